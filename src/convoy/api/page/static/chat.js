// A conversation. It lives in this page's memory, and in this browser's storage if the person wants that.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { streamChat } from "./server.js";
import { toHtml } from "./markdown.js";
import { choose, keepTurns, keepsNow, readTurns } from "./kept.js";
import { count } from "./words.js";

const EMPTY = { role: "assistant", content: "", reasoning: "", calls: [], rate: null, tokens: 0, prefilled: null, problem: "" };
const SHOWN_EVERY_MS = 60;

function addDelta(answer, delta) {
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
}

// The messages that the model gets: complete turns, without what the page alone shows.
const sent = (turns) => turns.filter((turn) => turn.content).map(({ role, content }) => ({ role, content }));

function Turn({ turn, running }) {
  if (turn.role === "user") return html`<li class="turn user"><h3 class="hidden">You</h3><p>${turn.content}</p></li>`;
  return html`<li class="turn" aria-busy=${running}>
    <h3 class="hidden">Answer</h3>
    ${turn.reasoning && html`<details class="reasoning"><summary>Reasoning</summary><p>${turn.reasoning}</p></details>`}
    <div class="prose" dangerouslySetInnerHTML=${{ __html: toHtml(turn.content) }}></div>
    ${turn.calls.filter(Boolean).map((call) => html`<div class="call card" key=${call.id}><strong>Calls ${call.name}</strong><pre tabindex="0" aria-label="Arguments"><code>${call.arguments}</code></pre></div>`)}
    ${turn.problem && html`<p class="notice bad" role="alert">${turn.problem}</p>`}
    ${running && !turn.content && !turn.reasoning && html`<p class="quiet-text">Reading the prompt …${turn.prefilled != null && ` ${turn.prefilled} %`}</p>`}
    ${turn.tokens > 0 && html`<p class="quiet-text">${count(turn.tokens, "token")}${turn.rate ? `, ${turn.rate.toFixed(1)} a second` : ""}</p>`}
  </li>`;
}

function ModelPicker({ chosen, set, models, states }) {
  if (models.length < 2) return html`<span class="quiet-text">${chosen}</span>`;
  const state = Object.fromEntries(states.map((one) => [one.name, one.state]));
  return html`<label class="picker">Model <select value=${chosen} onChange=${(e) => set(e.target.value)}>
    ${models.map(({ id }) => html`<option key=${id} value=${id}>${id}${state[id] && state[id] !== "loaded" ? ` (${state[id]})` : ""}</option>`)}</select></label>`;
}

function Settings({ settings, set, keeps, onKeep }) {
  const field = (name, label, rest) => html`<label>${label}<input value=${settings[name]} onInput=${(e) => set({ ...settings, [name]: e.target.value })} ...${rest} /></label>`;
  return html`<details class="settings-of-chat"><summary>Settings</summary><div class="card">
    ${field("temperature", "Temperature", { type: "number", min: 0, max: 2, step: 0.1, placeholder: "the model's own" })}
    ${field("max_tokens", "Most tokens", { type: "number", min: 1, step: 1, placeholder: "as many as fit" })}
    ${field("seed", "Seed", { type: "number", step: 1, placeholder: "a new one each time" })}
    <label class="wide">System message<textarea rows="2" value=${settings.system} onInput=${(e) => set({ ...settings, system: e.target.value })}></textarea></label>
    <label class="wide check"><input type="checkbox" checked=${keeps} onChange=${(e) => onKeep(e.target.checked)} /> Keep the conversation in this browser</label>
  </div></details>`;
}

export function Chat({ apiKey, needsKey, onKey, ofCoordinator, models, states }) {
  const [turns, setTurns] = useState(readTurns);
  const [keeps, setKeeps] = useState(keepsNow);
  const [unkept, setUnkept] = useState("");
  const [draft, setDraft] = useState("");
  const [settings, setSettings] = useState({ model: "", temperature: "", max_tokens: "", seed: "", system: "" });
  const [aborting, setAborting] = useState(null);
  const [key, setKey] = useState("");
  const end = useRef(null);
  // Until one is chosen, the model that is loaded answers soonest.
  const chosen = settings.model || states.find((one) => one.state === "loaded")?.name || models[0]?.id;
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [turns]);

  const answer = async (asked) => {
    const stopping = new AbortController();
    const reply = { ...EMPTY, calls: [] };
    let began = 0;
    let shown = 0;
    const show = () => { shown = performance.now(); setTurns([...asked, { ...reply }]); };
    setAborting(stopping);
    show();
    const numbers = Object.fromEntries(["temperature", "max_tokens", "seed"].filter((name) => settings[name] !== "").map((name) => [name, Number(settings[name])]));
    const system = settings.system ? [{ role: "system", content: settings.system }] : [];
    const body = { model: chosen, messages: [...system, ...sent(asked)], ...numbers };
    try {
      for await (const chunk of streamChat(apiKey, body, stopping.signal, !ofCoordinator)) {
        const delta = chunk.choices[0]?.delta;
        const progress = chunk.prompt_progress;
        if (progress) reply.prefilled = Math.floor((100 * progress.processed) / progress.total);
        if (delta) addDelta(reply, delta);
        if (!began && (reply.content || reply.reasoning || reply.calls.length)) began = performance.now();
        if (chunk.usage) {
          reply.tokens = chunk.usage.completion_tokens;
          // The first token comes with the prefill, so the rate is of the others.
          const took = (performance.now() - began) / 1000;
          if (reply.tokens > 2 && took > 0.05) reply.rate = (reply.tokens - 1) / took;
        }
        if (progress || performance.now() - shown > SHOWN_EVERY_MS) show();
      }
    } catch (error) {
      reply.problem = error.name === "AbortError" ? "Stopped." : error.message;
    }
    show();
    setUnkept(keepTurns([...asked, reply]));
    setAborting(null);
  };
  const forget = () => { setTurns([]); setUnkept(keepTurns([])); };
  const onKeep = (wanted) => { setKeeps(wanted); setUnkept(choose(wanted, turns)); };
  const send = (event) => {
    event.preventDefault();
    if (!draft.trim() || aborting) return;
    setDraft("");
    answer([...turns, { role: "user", content: draft.trim() }]);
  };
  const again = () => answer(turns.slice(0, -1));
  const typed = (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event); };

  if (needsKey && !apiKey) {
    return html`<h1>Chat</h1><form class="card" onSubmit=${(e) => { e.preventDefault(); onKey(key.trim()); }}>
      <p>This server asks for an API key, which stays in this page's memory.</p>
      <label>API key for chat <input type="password" autocomplete="off" value=${key} onInput=${(e) => setKey(e.target.value)} /></label> <button disabled=${!key.trim()}>Use it</button></form>`;
  }
  return html`<div class="chat">
    <div class="row"><h1>Chat</h1><${ModelPicker} chosen=${chosen} set=${(model) => setSettings({ ...settings, model })} models=${models} states=${states} />
      ${turns.length > 0 && !aborting && html`<button class="quiet" onClick=${forget}>New conversation</button>`}</div>
    ${turns.length === 0 && html`<p class="quiet-text">${keeps ? "The conversation is kept in this browser alone, until you begin a new one." : "The conversation is in this page's memory alone, and ends with it."}</p>`}
    ${turns.length === 0 && ofCoordinator && html`<p class="quiet-text">The coordinator and the provider that answers can read this chat. A tool behind <code>convoy proxy</code> keeps the coordinator out.</p>`}
    ${unkept && html`<p class="notice bad" role="alert">${unkept}</p>`}
    <ol class="turns" aria-label="Conversation">${turns.map((turn, index) => html`<${Turn} key=${index} turn=${turn} running=${Boolean(aborting) && index === turns.length - 1} />`)}</ol>
    <div ref=${end}></div>
    <form class="ask" onSubmit=${send}>
      <label class="hidden" for="draft">Message</label>
      <textarea id="draft" rows="2" placeholder="Ask the model" value=${draft} onInput=${(e) => setDraft(e.target.value)} onKeyDown=${typed}></textarea>
      <div class="row">
        ${aborting ? html`<button type="button" onClick=${() => aborting.abort()}>Stop</button>` : html`<button disabled=${!draft.trim()}>Send</button>`}
        ${!aborting && turns.at(-1)?.role === "assistant" && html`<button type="button" class="quiet" onClick=${again}>Ask again</button>`}
      </div>
    </form>
    <${Settings} settings=${settings} set=${setSettings} keeps=${keeps} onKeep=${onKeep} />
  </div>`;
}
