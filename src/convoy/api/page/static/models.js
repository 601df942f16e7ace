// The models that the head knows. Only operators load and unload them; every reader sees how far a load is.
import { html, useState } from "./vendor/preact-htm.js";
import { changeModel } from "./server.js";

const WORDS = { loaded: "loaded", loading: "is being loaded", unloaded: "not loaded" };

function Member({ name, done, total }) {
  const percent = total ? Math.floor((100 * done) / total) : 0;
  return html`<li><label>${name} <progress max="100" value=${percent}>${percent} %</progress></label> ${percent} %</li>`;
}

function Model({ model, operates, busy, onWish }) {
  const members = Object.entries(model.progress);
  return html`<li class="model" data-state=${model.state}>
    <div class="row"><span class=${`dot ${model.state === "loaded" ? "good" : ""}`}></span><strong>${model.name}</strong> <span class="quiet-text">${WORDS[model.state]}</span>
      ${operates && model.state === "unloaded" && html`<button class="quiet" disabled=${busy} onClick=${() => onWish(model.name, true)}>Load ${model.name}</button>`}
      ${operates && model.state === "loaded" && html`<button class="quiet" disabled=${busy} onClick=${() => onWish(model.name, false)}>Unload ${model.name}</button>`}</div>
    ${members.length > 0 && html`<ul>${members.map(([name, [done, total]]) => html`<${Member} key=${name} name=${name} done=${done} total=${total} />`)}</ul>`}
  </li>`;
}

export function Models({ states, operates }) {
  const [busy, setBusy] = useState("");
  const [problem, setProblem] = useState("");
  const wish = async (name, loaded) => {
    setBusy(loaded ? `${name} is loaded once the running answers have ended.` : `${name} is unloaded once the running answers have ended.`);
    setProblem("");
    try {
      await changeModel(name, loaded);
    } catch (error) {
      setProblem(error.message);
    }
    setBusy("");
  };
  // One model that is loaded needs no list.
  if (states.length < 2 && states.every((model) => model.state === "loaded") && !operates) return null;
  return html`<section class="card models" aria-label="Models">
    <h2>Models</h2>
    ${problem && html`<p class="notice bad" role="alert">${problem}</p>`}
    <ul>${states.map((model) => html`<${Model} key=${model.name} model=${model} operates=${operates} busy=${Boolean(busy)} onWish=${wish} />`)}</ul>
    <p class="quiet-text" role="status">${busy}</p>
  </section>`;
}
