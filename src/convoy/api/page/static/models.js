// The models that the head knows, and the last pull. Only operators load, unload and pull; every reader sees how far it is.
import { html, useState } from "./vendor/preact-htm.js";
import { changeModel, pullModel, stopPull } from "./server.js";

const WORDS = { loaded: "loaded", loading: "is being loaded", unloaded: "not loaded" };

function Member({ name, done, total }) {
  const percent = total ? Math.floor((100 * done) / total) : 0;
  return html`<li><label>${name} <progress max="100" value=${percent}>${percent} %</progress></label> ${percent} %</li>`;
}

const Members = ({ progress }) => html`<ul>${Object.entries(progress).map(([name, [done, total]]) => html`<${Member} key=${name} name=${name} done=${done} total=${total} />`)}</ul>`;

const ENDS = {
  pulling: ({ name }) => `${name} is being pulled: each member fetches its own layers.`,
  stopping: ({ name }) => `The pull of ${name} is being stopped.`,
  stopped: ({ name }) => `The pull of ${name} was stopped. The next one goes on from there.`,
  pulled: ({ name, progress }) => `${name} is on ${Object.keys(progress).sort().join(", ")}. Serve it with: convoy serve ${name}`,
  failed: ({ name, error, hint }) => `${name} was not pulled: ${error}.${hint ? ` To mend it: ${hint}.` : ""}`,
};

function Pull({ pull, operates, onPull, onStop }) {
  const [name, setName] = useState("");
  const runs = pull?.state === "pulling" || pull?.state === "stopping";
  return html`<div class="pull" data-state=${pull?.state ?? "none"}>
    ${pull && html`<div class="row"><span class=${pull.state === "failed" ? "notice bad" : "quiet-text"} role="status">${ENDS[pull.state](pull)}</span>
      ${operates && pull.state === "pulling" && html`<button class="quiet" onClick=${onStop}>Stop the pull</button>`}</div>`}
    ${runs && html`<${Members} progress=${pull.progress} />`}
    ${operates && !runs && html`<form class="row" onSubmit=${(event) => { event.preventDefault(); onPull(name.trim()); }}>
      <label>Model of the hub <input value=${name} placeholder="org/name:Q4_K_M" onInput=${(event) => setName(event.target.value)} required /></label>
      <button class="quiet">Pull</button></form>`}
  </div>`;
}

function Model({ model, operates, busy, onWish }) {
  return html`<li class="model" data-state=${model.state}>
    <div class="row"><span class=${`dot ${model.state === "loaded" ? "good" : ""}`}></span><strong>${model.name}</strong> <span class="quiet-text">${WORDS[model.state]}</span>
      ${operates && model.state === "unloaded" && html`<button class="quiet" disabled=${busy} onClick=${() => onWish(model.name, true)}>Load ${model.name}</button>`}
      ${operates && model.state === "loaded" && html`<button class="quiet" disabled=${busy} onClick=${() => onWish(model.name, false)}>Unload ${model.name}</button>`}</div>
    ${Object.keys(model.progress).length > 0 && html`<${Members} progress=${model.progress} />`}
  </li>`;
}

export function Models({ states, pull, operates }) {
  const [busy, setBusy] = useState("");
  const [problem, setProblem] = useState("");
  const attempt = async (text, action) => {
    setBusy(text);
    setProblem("");
    try {
      await action();
    } catch (error) {
      setProblem(error.message);
    }
    setBusy("");
  };
  const wish = (name, loaded) => attempt(`${name} is ${loaded ? "loaded" : "unloaded"} once the running answers have ended.`, () => changeModel(name, loaded));
  // One model that is loaded needs no list.
  if (states.length < 2 && states.every((model) => model.state === "loaded") && !operates && !pull) return null;
  return html`<section class="card models" aria-label="Models">
    <h2>Models</h2>
    ${problem && html`<p class="notice bad" role="alert">${problem}</p>`}
    <ul>${states.map((model) => html`<${Model} key=${model.name} model=${model} operates=${operates} busy=${Boolean(busy)} onWish=${wish} />`)}</ul>
    <${Pull} pull=${pull} operates=${operates} onPull=${(name) => attempt("", () => pullModel(name))} onStop=${() => attempt("", stopPull)} />
    <p class="quiet-text" role="status">${busy}</p>
  </section>`;
}
