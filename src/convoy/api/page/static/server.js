// All requests to the head or the coordinator. An API key is held by the caller, in memory, and goes into one header.

const headersOf = (key) => (key ? { authorization: `Bearer ${key}` } : {});

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer. Is it running? This page tries again by itself.", 0);
  }
  if (answer.ok) return answer;
  let message = `The server answered ${answer.status}.`;
  try {
    message = (await answer.json()).error.message;
  } catch { /* The body explains nothing, so the status is all there is to say. */ }
  throw new Refused(message, answer.status);
}

export const about = async (key) => (await ask("/page/session", { headers: headersOf(key) })).json();
export const readModels = async (key) => (await (await ask("/v1/models", { headers: headersOf(key) })).json()).data;
export const endSession = () => ask("/page/session", { method: "DELETE" });
export const endAllSessions = () => ask("/page/sessions", { method: "DELETE" });
const send = (path, body) => ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
export const beginSession = (token) => send("/page/session", { token });
export const readInvitations = async () => (await (await ask("/page/invitations")).json()).invitations;
export const answerInvitation = ({ id, code }, approves) => send("/page/invitations", { id, code, approves });

export const changeModel = (name, loaded) => send("/page/models", { name, loaded });
export const pullModel = (name) => send("/page/pull", { name });
export const stopPull = () => ask("/page/pull", { method: "DELETE" });

// Yield the data of each server-sent event.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) yield data;
    }
  }
}

export const RETRY_MS = 1000;
const SILENT_MS = 15000;

// Call `told` with each status until the returned function is called. A stream that breaks is asked for again.
export function watchStatus(key, told, lost, refused) {
  let aborting = new AbortController();
  let ended = false;
  const run = async () => {
    while (!ended) {
      aborting = new AbortController();
      let silent = 0;
      const restart = () => { clearTimeout(silent); silent = setTimeout(() => aborting.abort(), SILENT_MS); };
      try {
        const headers = { ...headersOf(key), accept: "text/event-stream" };
        const answer = await ask("/status", { headers, signal: aborting.signal });
        restart();
        for await (const data of eventsOf(answer)) {
          restart();
          const status = JSON.parse(data);
          if (status.failed) lost(`The server cannot say its status now (${status.failed}).`);
          else told(status);
        }
      } catch (error) {
        if (error.status === 401 || error.status === 403) return refused();
      } finally {
        clearTimeout(silent);
      }
      if (ended) return undefined;
      lost("The connection to the server is lost. This page tries again by itself; nothing here is newer than that.");
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
    return undefined;
  };
  run();
  return () => { ended = true; aborting.abort(); };
}

// Yield the chunks of a chat's answer. An error inside the stream is thrown in the server's words.
export async function* streamChat(key, body, signal, tellsProgress) {
  const headers = { ...headersOf(key), "content-type": "application/json" };
  const sent = JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, ...(tellsProgress && { include_progress: true }) } });
  const answer = await ask("/v1/chat/completions", { method: "POST", headers, body: sent, signal });
  for await (const data of eventsOf(answer)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message, 200);
    yield chunk;
  }
  throw new Refused("The answer ended before it was complete. What came is shown above.", 0);
}
