// Requests over time, from the statuses that this page has seen.
import { html, useEffect, useRef } from "./vendor/preact-htm.js";
import { fleetChanges, fleetFacts, placesInUse } from "./fleet.js";

const MAX_POINTS = 1200;
const MAX_EVENTS = 200;

const membersOf = (status) => [...new Set(status.stages.map((stage) => stage.member))].join(", ");

// Return what happened to the cluster between two statuses, in sentences. No status holds a text of a request.
function changes(before, now) {
  const told = [];
  const [was, is] = [before, now].map((status) => status.absent.map((one) => one.name));
  const gone = is.filter((name) => !was.includes(name));
  const back = was.filter((name) => !is.includes(name));
  for (const name of gone) told.push(`${name} is lost.`);
  for (const name of back) told.push(`${name} is back.`);
  if (now.recoveries > before.recoveries) told.push("A loss was survived: the requests go on.");
  if (now.generation !== before.generation) told.push(`Plan ${now.generation} counts: layers on ${membersOf(now)}.`);
  if (now.ready !== before.ready) told.push(now.ready ? "Ready." : `Not ready: ${now.reason}.`);
  if (now.roster_epoch !== before.roster_epoch) told.push(`Epoch ${now.roster_epoch} of the roster counts.`);
  return told;
}

export class History {
  constructor() {
    this.columns = [[], [], [], [], [], []];
    this.events = [];
    this.last = null;
  }

  // Add the last status again if none has come for a second: a server that has no news sends none.
  rest() {
    if (this.last && Date.now() / 1000 - this.last.now > 0.9) this.add(this.last.status);
  }

  add(status) {
    const now = Date.now() / 1000;
    const used = status.offered ? placesInUse(status) : status.num_blocks ? (100 * (status.num_blocks - status.free_blocks)) / status.num_blocks : 0;
    const rate = (name) => {
      const grown = this.last ? status[name] - this.last.status[name] : 0;
      // A head that was started again counts from 0.
      return grown < 0 || !this.last ? 0 : grown / Math.max(now - this.last.now, 0.05);
    };
    const row = [now, status.running, status.waiting, rate("generated_tokens"), rate("prompt_tokens"), used];
    row.forEach((value, index) => this.columns[index].push(value));
    if (this.columns[0].length > MAX_POINTS) this.columns.forEach((column) => column.shift());
    if (this.last && this.last.status !== status) this.events.unshift(...(status.offered ? fleetChanges : changes)(this.last.status, status).reverse().map((text) => ({ at: now, text })));
    this.events.length = Math.min(this.events.length, MAX_EVENTS);
    this.last = { now, status };
  }
}

const timeOf = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function Chart({ title, history, lines, now, least }) {
  const place = useRef(null);
  const chart = useRef(null);
  const data = [history.columns[0], ...lines.map((line) => history.columns[line.column])];
  useEffect(() => {
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, space: 90, font: "12px system-ui" };
    const make = () => {
      chart.current?.destroy();
      chart.current = new window.uPlot({
        width: Math.max(place.current.clientWidth, 200), height: 170, legend: { show: false }, cursor: { show: false },
        scales: { x: { range: (_, low, high) => [Math.min(low, high - 30), high] }, y: { range: (_, _low, high) => [0, Math.max(least, high * 1.1)] } },
        axes: [{ ...axis, size: 30, values: (_, times) => times.map(timeOf) }, { ...axis, size: 44, space: 40 }],
        series: [{}, ...lines.map((line) => ({ label: line.label, stroke: colour(line.colour), width: 2, points: { show: false } }))],
      }, data, place.current);
    };
    const resized = new ResizeObserver(make);
    resized.observe(place.current);
    return () => { resized.disconnect(); chart.current?.destroy(); };
  }, []);
  useEffect(() => { chart.current?.setData(data); }, [now]);
  const told = lines.map((line) => `${line.label} ${Math.round(history.columns[line.column].at(-1) ?? 0)}`).join(", ");
  return html`<figure class="card chart"><figcaption>${title}
    <span class="legend">${lines.map((line) => html`<span key=${line.label}><i class=${line.colour.slice(2)}></i>${line.label}</span>`)}</span></figcaption>
    <div ref=${place} role="img" aria-label=${`${title} now: ${told}`}></div></figure>`;
}

function headFacts(status, history) {
  const asked = status.queried_tokens;
  return [
    ["K/V in use", `${Math.round(history.columns[5].at(-1))} %`],
    ["Prefix hits", asked ? `${Math.round((100 * status.hit_tokens) / asked)} %` : "none yet"],
    ["Right guesses", status.drafted_tokens ? `${Math.round((100 * status.accepted_tokens) / status.drafted_tokens)} %` : "none yet"],
    ["Losses survived", status.recoveries],
  ];
}

// What the counts are of, in a sentence.
function scopeOf({ offered, record }) {
  if (!offered) return "Counts are of the whole head, since it began.";
  if (record) return "Counts are of the whole coordinator, since it began. Tokens of answers are those that providers report.";
  return "Requests are those of your account. Tokens are those of your key since the coordinator began, and count when an answer ends.";
}

export function Requests({ status, history }) {
  const now = history.last.now;
  const rate = history.columns[3].at(-1);
  const facts = [
    ["Running", status.running], ["Waiting", status.waiting], ["Tokens a second", rate >= 10 ? Math.round(rate) : rate.toFixed(1)],
    ...(status.offered ? fleetFacts(status) : headFacts(status, history)),
    ["Generated", status.generated_tokens.toLocaleString("en")], ["Read in prompts", status.prompt_tokens.toLocaleString("en")],
  ];
  return html`<h1>Requests</h1>
    <dl class="tiles">${facts.map(([name, value]) => html`<div class="card" key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <div class="charts">
      <${Chart} title="Tokens a second" history=${history} now=${now} least=${5} lines=${[{ label: "generated", column: 3, colour: "--one" }, { label: "prompts", column: 4, colour: "--two" }]} />
      <${Chart} title="Requests" history=${history} now=${now} least=${4} lines=${[{ label: "running", column: 1, colour: "--one" }, { label: "waiting", column: 2, colour: "--two" }]} />
      ${(!status.offered || status.record) && html`<${Chart} title=${status.offered ? "Places in use, %" : "K/V in use, %"} history=${history} now=${now} least=${100} lines=${[{ label: "in use", column: 5, colour: "--one" }]} />`}
    </div>
    <section aria-labelledby="events"><h2 id="events">Events</h2>
      ${history.events.length === 0 ? html`<p class="quiet-text">Nothing happened since this page was opened.</p>` : html`<div role="log" aria-labelledby="events"><ol class="others">${history.events.map((event) =>
        html`<li class="card"><time>${timeOf(event.at)}</time> <span>${event.text}</span></li>`)}</ol></div>`}</section>
    <p class="quiet-text">${scopeOf(status)} The curves and events begin when this page was opened; no text of a request is here.</p>`;
}
