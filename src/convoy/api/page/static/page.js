// The frame of the page: sign-in, the four views, and the state that they share.
import { html, render, useEffect, useState } from "./vendor/preact-htm.js";
import { RETRY_MS, about, beginSession, endAllSessions, endSession, readModels, watchStatus } from "./server.js";
import { Cluster } from "./cluster.js";
import { Fleet } from "./fleet.js";
import { Requests, History } from "./requests.js";
import { Invitations } from "./invitations.js";
import { Models } from "./models.js";
import { Connect } from "./connect.js";
import { Chat } from "./chat.js";

const VIEWS = { cluster: ["Cluster", Cluster], requests: ["Requests", Requests], chat: ["Chat", Chat], connect: ["Connect", Connect] };
const OF_COORDINATOR = { ...VIEWS, cluster: ["Fleet", Fleet] };
const history = new History();

function viewOf(hash) {
  const name = hash.slice(1);
  return name in VIEWS ? name : "cluster";
}

// The token stands in the fragment, which no request carries. It leaves the address at once.
async function takeToken() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return null;
  window.history.replaceState(null, "", "/");
  try {
    await beginSession(token);
  } catch (error) {
    return error.message;
  }
  return null;
}

function SignIn({ problem, onKey }) {
  const [key, setKey] = useState("");
  const submit = (event) => { event.preventDefault(); onKey(key.trim()); };
  return html`<main class="signin card">
    <h1>Sign in</h1>
    ${problem && html`<p class="notice bad" role="alert">${problem}</p>`}
    <p>On the server's own machine, as its user, run</p>
    <pre><code>convoy open${location.port === "8000" && location.protocol === "http:" ? "" : ` --url ${location.origin}`}</code></pre>
    <p>and open the address that it prints. Or look with an API key, which stays in this page's memory:</p>
    <form onSubmit=${submit}>
      <label>API key <input type="password" autocomplete="off" value=${key} onInput=${(e) => setKey(e.target.value)} /></label>
      <button disabled=${!key.trim()}>Look</button>
    </form>
  </main>`;
}

function Rights({ rights, onEnd }) {
  const words = { use: "Looking with an API key", view: "May look", operate: "May operate" };
  const open = rights.scope === "use" && !rights.needs_key;
  return html`<details class="rights">
    <summary><span class=${`dot ${rights.scope === "operate" ? "good" : ""}`}></span>${open ? "Open without a key" : words[rights.scope]}</summary>
    <div class="menu card">
      ${rights.scope === "use"
        ? html`<p>To operate, open the address that <code>convoy open</code> prints.</p>`
        : html`<button class="quiet" onClick=${() => onEnd(endSession)}>Sign out</button>`}
      ${rights.scope === "operate" && html`<button class="quiet" onClick=${() => onEnd(endAllSessions)}>Sign everybody out</button>`}
    </div>
  </details>`;
}

function Page() {
  const [view, setView] = useState(viewOf(location.hash));
  const [rights, setRights] = useState(null);
  const [apiKey, setApiKey] = useState("");
  const [status, setStatus] = useState(null);
  // What `start` met. A watch that ends late may tell of a loss when nobody is signed in, which hides no sign-in.
  const [unreached, setUnreached] = useState("");
  const [lost, setLost] = useState("");
  const [problem, setProblem] = useState("");
  const [models, setModels] = useState([]);

  const start = async (key) => {
    try {
      setRights(await about(key));
      setApiKey(key);
      setProblem("");
      setUnreached("");
      setLost("");
    } catch (error) {
      setRights(null);
      if (error.status !== 401 && error.status !== 403) {
        setUnreached(error.message);
        setTimeout(() => start(key), RETRY_MS);
        return;
      }
      setUnreached("");
      if (key) setProblem(error.message);
    }
  };
  useEffect(() => {
    takeToken().then((failed) => { setProblem(failed ?? ""); return start("").then(() => failed && setProblem(failed)); });
    const moved = () => setView(viewOf(location.hash));
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    if (!rights) return undefined;
    readModels(apiKey).then(setModels, () => setModels([]));
    let live = false;
    const show = (told) => { live = true; history.add(told); setStatus(told); setLost(""); };
    const stop = watchStatus(apiKey, show, (why) => { live = false; setLost(why); }, () => { setRights(null); setStatus(null); });
    const resting = setInterval(() => { if (live) { history.rest(); setStatus((now) => now && { ...now }); } }, 1000);
    return () => { clearInterval(resting); stop(); };
  }, [rights, apiKey]);

  const notice = rights ? lost : unreached;
  if (!rights && !notice) return html`<${SignIn} problem=${problem} onKey=${start} />`;
  const end = (how) => how().then(() => { setStatus(null); return start(apiKey); }, (error) => setProblem(error.message));
  const ofCoordinator = rights?.server === "coordinator";
  const views = ofCoordinator ? OF_COORDINATOR : VIEWS;
  const Shown = views[view][1];
  // A session has no key to ask for the list, but a coordinator's status has the models.
  const known = models.length ? models : status?.offered ?? [];
  return html`
    <a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.getElementById("main").focus(); }}>Skip to content</a>
    <header>
      <a class="brand" href="#cluster"><img src="/page/static/icon.svg" alt="" width="26" height="26" />Convoy</a>
      <nav aria-label="Views">${Object.entries(views).map(([name, [label]]) =>
        html`<a key=${name} href=${`#${name}`} aria-current=${name === view ? "page" : null}>${label}</a>`)}</nav>
      ${rights && html`<${Rights} rights=${rights} onEnd=${end} />`}
    </header>
    <main id="main" tabindex="-1">
      ${problem && html`<p class="notice bad" role="alert">${problem}</p>`}
      ${notice && html`<p class="notice bad" role="alert">${notice}</p>`}
      ${rights?.scope === "operate" && !ofCoordinator && html`<${Invitations} />`}
      ${view === "cluster" && status?.models && html`<${Models} states=${status.models} pull=${status.pull} operates=${rights?.scope === "operate"} />`}
      ${view !== "chat" && (status
        ? html`<${Shown} status=${status} history=${history} models=${known} rights=${rights} />`
        : !notice && html`<p class="quiet-text">Asking the server …</p>`)}
      <div hidden=${view !== "chat"}><${Chat} apiKey=${apiKey} needsKey=${rights?.needs_key} onKey=${setApiKey} ofCoordinator=${ofCoordinator} models=${known} states=${status?.models ?? []} /></div>
    </main>`;
}

render(html`<${Page} />`, document.getElementById("page"));
