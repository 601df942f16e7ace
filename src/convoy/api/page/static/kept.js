// The conversation that this browser keeps, and nobody else: it is sent to the head as part of a question alone.
const NAME = "convoy-conversation";
const CHOICE = "convoy-keeps";
const MAX_CHARACTERS = 1_000_000;

// On loopback the browser and the head are the same machine. Elsewhere the person decides.
const isLoopback = /^(localhost|127(\.\d+){3}|\[::1\])$/.test(location.hostname);
export const keepsNow = () => (localStorage.getItem(CHOICE) ?? (isLoopback ? "yes" : "no")) === "yes";

const text = (value) => (typeof value === "string" ? value : "");

// Return the turns that were kept; none if there are none, or if they are not ours.
export function readTurns() {
  if (!keepsNow()) return [];
  try {
    const turns = JSON.parse(localStorage.getItem(NAME) ?? "[]");
    return turns.map(({ role, content, reasoning, calls }) => ({
      role: role === "user" ? "user" : "assistant", content: text(content), reasoning: text(reasoning), rate: null, tokens: 0, problem: "",
      calls: (Array.isArray(calls) ? calls : []).map((call) => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) })),
    }));
  } catch {
    return [];
  }
}

// Keep `turns`, and return a sentence if that cannot be done. Empty turns are removed.
export function keepTurns(turns) {
  if (!turns.length || !keepsNow()) {
    localStorage.removeItem(NAME);
    return "";
  }
  const kept = JSON.stringify(turns.map(({ role, content, reasoning, calls }) => ({ role, content, reasoning, calls })));
  try {
    if (kept.length > MAX_CHARACTERS) throw new RangeError();
    localStorage.setItem(NAME, kept);
    return "";
  } catch {
    return "This conversation is too long to be kept: it ends with this page.";
  }
}

export function choose(keeps, turns) {
  localStorage.setItem(CHOICE, keeps ? "yes" : "no");
  return keepTurns(turns);
}
