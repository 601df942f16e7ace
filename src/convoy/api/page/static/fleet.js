// A coordinator's providers: what each proved and has room for, who went or was kept out and why, and the models.
import { html } from "./vendor/preact-htm.js";
import { LEVELS, age, count, pairs, perSecond } from "./words.js";

const sum = (values) => values.reduce((total, value) => total + value, 0);
const modelsOf = (provider) => Object.entries(provider.places);
const onTrial = (provider) => modelsOf(provider).some(([, room]) => room.on_trial);
// How a provider went: left has drained first, lost has not, removed was revoked by an administrator.
const WENT = { left: "has left", lost: "is lost", removed: "is removed" };
const levelOf = (level) => LEVELS[level] ?? level;
const levelsOf = (levels) => Object.entries(levels).map(([level, number]) => `${number} with ${levelOf(level)}`).join(", ");

// Return the percentage of all places that are taken; 0 for a reader who does not see them.
export function placesInUse({ record }) {
  const rooms = (record?.providers ?? []).flatMap((one) => modelsOf(one).map(([model, room]) => [room.slots, one.models[model] + room.taken_elsewhere]));
  const slots = sum(rooms.map(([all]) => all));
  return slots ? Math.min(100, (100 * sum(rooms.map(([, taken]) => taken))) / slots) : 0;
}

// Return what happened to the fleet between two statuses, in sentences.
export function fleetChanges(before, now) {
  const told = [];
  if (before.record && now.record) {
    const [old, fresh] = [before.record, now.record];
    const known = Object.fromEntries(old.providers.map((one) => [one.name, one]));
    const left = new Set(old.gone.map((one) => one.name + one.since_unix_s));
    for (const one of fresh.gone) if (!left.has(one.name + one.since_unix_s)) told.push(`${one.name} ${WENT[one.how]}: ${one.reason}.`);
    for (const one of fresh.providers) {
      const was = known[one.name];
      if (was?.since_unix_s !== one.since_unix_s) told.push(`${one.name} is connected, with ${levelOf(one.level)}.`);
      else {
        if (was.level !== one.level) told.push(`${one.name} has ${levelOf(one.level)} now.`);
        if (one.draining && !was.draining) told.push(`${one.name} takes nothing new: it is about to leave.`);
        if (onTrial(one) !== onTrial(was)) told.push(onTrial(one) ? `${one.name} failed a request, and is on trial.` : `${one.name} answered well again.`);
      }
    }
    if (fresh.retries > old.retries) told.push(`${count(fresh.retries - old.retries, "request")} went on to another try.`);
    const times = Object.fromEntries(old.refusals.map((one) => [one.reason, one.times]));
    for (const one of fresh.refusals) if (one.times > (times[one.reason] ?? 0)) told.push(`A registration was refused: ${one.reason}.`);
    for (const key of fresh.unapproved) if (!old.unapproved.includes(key)) told.push(`A provider with the key ${pairs(key)} waits for approval.`);
  }
  if (now.ready !== before.ready) told.push(now.ready ? "Ready." : `Not ready: ${now.reason}.`);
  return told;
}

// Return the names and values of the tiles on the view of requests, after those of every server.
export function fleetFacts({ record, offered }) {
  if (!record) return [["Models", offered.length]];
  const over = sum(Object.values(record.outcomes));
  return [
    ["Places in use", `${Math.round(placesInUse({ record }))} %`], ["Complete", (record.outcomes.complete ?? 0).toLocaleString("en")],
    ["Ended otherwise", (over - (record.outcomes.complete ?? 0)).toLocaleString("en")], ["Tried again", record.retries.toLocaleString("en")],
    ["Providers lost", record.num_lost.toLocaleString("en")], ["Providers removed", record.num_removed.toLocaleString("en")], ["Came sealed", `${record.sealed.toLocaleString("en")} of ${over.toLocaleString("en")}`],
  ];
}

function Room({ model, room, running }) {
  const told = `${running} of ${count(room.slots, "place")} taken${room.taken_elsewhere ? `, ${room.taken_elsewhere} by others` : ""}`;
  const width = (part) => ({ width: `${Math.min(100, (100 * part) / room.slots)}%` });
  return html`<li><p class="layers">${model}</p>
    <div class="bar" role="img" aria-label=${`${model}: ${told}`}>${running > 0 && html`<span class="weights" style=${width(running)}></span>`}${room.taken_elsewhere > 0 && html`<span class="kv" style=${width(room.taken_elsewhere)}></span>`}</div>
    <p class="quiet-text">${told}; alone about ${perSecond(room.tokens_per_s)}; context ${room.max_context.toLocaleString("en")}</p></li>`;
}

function Evidence({ provider }) {
  const members = Object.entries(provider.members);
  return html`${levelOf(provider.level)}<br /><span class="quiet-text">${provider.why}${members.length > 1 && html`. ${members.map(([name, level]) => `${name}: ${levelOf(level)}`).join(", ")}`}${provider.absent.length > 0 && html`. No evidence of ${provider.absent.join(", ")}`}</span>`;
}

function Provider({ provider }) {
  const trial = onTrial(provider);
  return html`<li class=${`machine card ${trial ? "gone" : ""}`}>
    <div class="row"><h3>${provider.name}</h3>${provider.draining && html`<span class="tag">takes nothing new</span>`}${trial && html`<span class="tag bad">on trial</span>`}</div>
    <ul class="rooms">${modelsOf(provider).map(([model, room]) => html`<${Room} key=${model} model=${model} room=${room} running=${provider.models[model]} />`)}</ul>
    <dl>
      <dt>Key</dt><dd><code title=${provider.identity}>${pairs(provider.identity)}</code></dd>
      <dt>Evidence</dt><dd><${Evidence} provider=${provider} /></dd>
      <dt>Answers</dt><dd>${provider.answers.toLocaleString("en")} settled, ${count(provider.failures, "failure")}</dd>
      ${provider.failed_proofs > 0 && html`<dt>Challenges</dt><dd>${provider.failed_proofs} not answered rightly</dd>`}
      ${provider.unbilled_tokens > 0 && html`<dt>Not billed</dt><dd>${count(provider.unbilled_tokens, "token")} beyond what was sent or seen</dd>`}
      <dt>Connected</dt><dd>for ${age(provider.since_unix_s)}</dd>
      <dt>Software</dt><dd>${provider.software}</dd>
    </dl></li>`;
}

function Unapproved({ keys }) {
  return html`<section class="invitations" aria-label="Providers that wait for approval"><ul>${keys.map((key) => html`<li key=${key} class="invitation card"><h3>A new provider waits for approval</h3>
    <p>Compare its key with the one that it prints, then run on this coordinator's machine</p>
    <pre tabindex="0" aria-label="Command that approves it"><code>convoy coordinator providers --approve ${key} NAME</code></pre></li>`)}</ul></section>`;
}

function Providers({ record }) {
  const more = record.num_providers - record.providers.length;
  return html`<section aria-labelledby="providers"><h2 id="providers">Providers</h2>
    ${record.providers.length === 0 && html`<p class="quiet-text">None is connected. A head registers with <code>convoy serve MODEL --provide ${location.origin.replace("http", "ws")} --coordinator-key ${record.coordinator_key}</code></p>`}
    <ul class="fleet">${record.providers.map((one) => html`<${Provider} key=${one.name} provider=${one} />`)}</ul>
    ${more > 0 && html`<p class="quiet-text">And ${more.toLocaleString("en")} more.</p>`}</section>`;
}

function Model({ model }) {
  const { id, providers, levels, free_slots: free, waiting, max_context: context } = model;
  return html`<li class="row"><span><span class=${`dot ${providers ? "good" : "bad"}`}></span><strong>${id}</strong></span>
    <span>${providers ? `${count(providers, "provider")} (${levelsOf(levels)})` : "no provider"}</span>
    ${providers > 0 && html`<span class="quiet-text">${free != null && `${count(free, "free place")}, `}${waiting} waiting, context ${context.toLocaleString("en")}</span>`}</li>`;
}

function Gone({ gone }) {
  if (!gone.length) return null;
  return html`<section aria-labelledby="gone"><h2 id="gone">Providers that left</h2><ul class="others card">${gone.map((one) => html`<li key=${one.name} class="row">
    <strong>${one.name}</strong><span class=${`tag ${one.how === "lost" ? "bad" : ""}`}>${one.how}</span><span>${one.reason}</span>
    <span class="quiet-text">${age(one.since_unix_s)} ago, key ${pairs(one.identity)}, ${levelOf(one.level)}</span></li>`)}</ul></section>`;
}

function Refusals({ refusals }) {
  if (!refusals.length) return null;
  return html`<section aria-labelledby="refusals"><h2 id="refusals">Refused registrations</h2><ul class="others card">${refusals.map((one) => html`<li key=${one.reason}>
    ${one.reason} <span class="quiet-text">${one.times > 1 ? `${one.times} times, last ` : ""}${age(one.last_unix_s)} ago</span></li>`)}</ul></section>`;
}

function readBy({ sealed, outcomes }) {
  const over = sum(Object.values(outcomes));
  if (!over) return "Reads what comes in clear, and nothing of what convoy proxy seals.";
  if (!sealed) return `Could read all ${count(over, "request")} so far: none came sealed by convoy proxy.`;
  if (sealed === over) return `Could read none of ${count(over, "request")}: all came sealed by convoy proxy.`;
  return `Could not read ${sealed.toLocaleString("en")} of ${count(over, "request")}, which convoy proxy sealed. It could read the others.`;
}

function Trust({ record }) {
  return html`<section aria-labelledby="trust"><h2 id="trust">Trust</h2><dl class="card pairs">
    <div><dt>This coordinator</dt><dd>${readBy(record)}</dd></div>
    <div><dt>A provider</dt><dd>Reads the prompts of the requests that it answers.</dd></div>
    <div><dt>This coordinator's key</dt><dd><code>${record.coordinator_key}</code></dd></div></dl></section>`;
}

export function Fleet({ status }) {
  const { record, offered } = status;
  return html`
    ${record?.unapproved.length > 0 && html`<${Unapproved} keys=${record.unapproved} />`}
    <section class="head-line">
      <div><h1>Fleet</h1>
      <p><span class=${`dot ${status.ready ? "good" : "bad"}`}></span><strong role="status">${status.ready ? "Ready" : "Not ready"}</strong>: ${status.reason}</p></div>
      <dl class="facts-line">
        <div><dt>Running</dt><dd>${status.running}</dd></div><div><dt>Waiting</dt><dd>${status.waiting}</dd></div>
        ${record && html`<div><dt>Free places</dt><dd>${sum(offered.map((one) => one.free_slots)).toLocaleString("en")}</dd></div>`}
      </dl>
    </section>
    ${record ? html`<${Providers} record=${record} />` : html`<p class="quiet-text">An API key sees the models and the requests of its own account. The providers are shown to sessions of <code>convoy open</code>.</p>`}
    <section aria-labelledby="models"><h2 id="models">Models</h2>${offered.length === 0
      ? html`<p class="quiet-text">No provider serves a model, and none has a price.</p>`
      : html`<ul class="others card">${offered.map((one) => html`<${Model} key=${one.id} model=${one} />`)}</ul>`}</section>
    ${record && html`<${Gone} gone=${record.gone} /><${Refusals} refusals=${record.refusals} /><${Trust} record=${record} />`}`;
}
