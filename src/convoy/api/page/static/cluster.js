// The route as a line of machines, with the sealed hops between them.
import { html } from "./vendor/preact-htm.js";
import { Forecast } from "./forecast.js";
import { Step } from "./step.js";
import { LEVELS, age, bytes, count, pairs, seconds } from "./words.js";

function layersOf(stage) {
  const parts = [];
  if (stage.embed) parts.push("embedding");
  if (stage.end > stage.start) parts.push(stage.end - stage.start === 1 ? `layer ${stage.start}` : `layers ${stage.start} to ${stage.end - 1}`);
  if (stage.output) parts.push("output");
  return parts.join(", ");
}

function Memory({ stage }) {
  const total = Math.max(stage.memory_bytes, stage.weight_bytes + stage.kv_bytes, 1);
  const free = Math.max(0, stage.memory_bytes - stage.weight_bytes - stage.kv_bytes);
  const width = (part) => ({ width: `${(100 * part) / total}%` });
  const told = `weights ${bytes(stage.weight_bytes)}, K/V ${bytes(stage.kv_bytes)}, free ${bytes(free)}`;
  return html`<div class="memory">
    <div class="bar" role="img" aria-label=${`Memory: ${told}`}>
      <span class="weights" style=${width(stage.weight_bytes)}></span><span class="kv" style=${width(stage.kv_bytes)}></span>
    </div>
    <ul class="key"><li class="weights">weights ${bytes(stage.weight_bytes)}</li><li class="kv">K/V ${bytes(stage.kv_bytes)}</li><li>free ${bytes(free)}</li></ul>
  </div>`;
}

function Machine({ stage }) {
  const gone = !stage.head && !stage.link_id;
  const reads = stage.can_read_prompts;
  return html`<li class=${`machine card ${gone ? "gone" : ""}`}>
    <div class="row"><h3>${stage.member}</h3>${stage.head && html`<span class="tag">head</span>`}${gone && html`<span class="tag bad">lost</span>`}
      ${stage.world_size > 1 && html`<span class="tag">rank ${stage.rank} of ${stage.world_size}</span>`}</div>
    <p class="layers">${layersOf(stage)}</p>
    <${Memory} stage=${stage} />
    <p class="reads">${reads ? html`<strong>Can read prompts</strong>, from ${reads}` : "Cannot read prompts"}</p>
    <dl>
      <dt>Identity</dt><dd><code title=${stage.fingerprint}>${pairs(stage.fingerprint) || "not in the roster"}</code></dd>
      <dt>Level</dt><dd>${LEVELS[stage.level] ?? stage.level}</dd>
      <dt>Hardware</dt><dd>${stage.device}${stage.platform && html` <span class="quiet-text">${stage.platform}</span>`}</dd>
      <dt>Kernel</dt><dd>${stage.kernel}</dd>
      <dt>Address</dt><dd>${stage.address || "unknown"}</dd>
    </dl>
  </li>`;
}

// The figures are of the head's own link to the member. A link between two peers is sealed alike, but only they
// measure it.
function Hop({ stage }) {
  if (stage.head) return html`<li class="hop"><span class="wire" aria-hidden="true"></span><p class="facts"><span>back to the head</span></p></li>`;
  const sealed = stage.sealed_bytes_sent + stage.sealed_bytes_received;
  const over = !stage.link_id;
  return html`<li class=${`hop ${over ? "gone" : ""}`} aria-label=${`Link of the head to ${stage.member}`}>
    <span class="wire" aria-hidden="true"></span>
    ${over ? html`<p class="facts"><strong>link over</strong></p>` : html`<p class="facts">
      <span>head to ${stage.member}</span> <strong>${stage.cipher}</strong> <span>keys ${stage.keyed_unix_s == null ? "unknown" : `${age(stage.keyed_unix_s)} old`}</span>
      <span>${seconds(stage.round_trip_s)} there and back</span> <span>${bytes(sealed)} sealed</span></p>`}
  </li>`;
}

function Others({ status }) {
  const rows = [
    ...status.standbys.map((one) => [one.name, "standby", one.layers ? `has loaded layers ${one.layers}` : "holds nothing yet"]),
    ...status.idle.map((one) => [one.name, "idle", `connected for ${age(one.since_unix_s)}, no layers`]),
    ...status.absent.map((one) => [one.name, "absent", `${one.since_unix_s == null ? "not seen since this head started" : `gone for ${age(one.since_unix_s)}`}; the head keeps dialling it`]),
    ...status.verdicts.filter((one) => one.excluded).map((one) => [one.member, "excluded", one.reasons.join("; ")]),
  ];
  if (!rows.length) return null;
  return html`<section aria-labelledby="others"><h2 id="others">Members without layers</h2>
    <ul class="others card">${rows.map(([name, kind, what]) =>
      html`<li key=${name + kind}><strong>${name}</strong> <span class=${`tag ${kind === "absent" ? "bad" : ""}`}>${kind}</span> <span>${what}</span></li>`)}</ul></section>`;
}

export function Cluster({ status }) {
  const room = status.num_blocks ? Math.round((100 * (status.num_blocks - status.free_blocks)) / status.num_blocks) : 0;
  const stages = status.stages;
  return html`
    <section class="head-line">
      <div><h1>${status.model}</h1>
      <p><span class=${`dot ${status.ready ? "good" : "bad"}`}></span><strong role="status">${status.ready ? "Ready" : "Not ready"}</strong>: ${status.reason}</p></div>
      <dl class="facts-line">
        <div><dt>Running</dt><dd>${status.running}</dd></div><div><dt>Waiting</dt><dd>${status.waiting}</dd></div>
        <div><dt>K/V in use</dt><dd>${room} %</dd></div><div><dt>Round the ring</dt><dd>${seconds(status.ring_s)}</dd></div>
        <div><dt>Context</dt><dd>${status.max_context.toLocaleString("en")}</dd></div>
      </dl>
    </section>
    <section aria-labelledby="route"><h2 id="route">The way of a token</h2>
      <ol class="route">${stages.map((stage, index) => html`
        ${(index > 0 || !stage.head) && html`<${Hop} key=${`hop ${stage.member}`} stage=${stage} />`}<${Machine} key=${stage.member} stage=${stage} />`)}</ol>
      <p class="quiet-text">A machine with layers computes on activations, and whoever has activations can recover the prompt. Links keep everybody else out: each arrow shows the link of the head to the machine that it points to.</p>
    </section>
    <${Step} path=${status.step_path} />
    <${Forecast} status=${status} />
    <${Others} status=${status} />
    <section aria-labelledby="trust"><h2 id="trust">Trust and plan</h2>
      <dl class="card pairs">
        <div><dt>Cluster</dt><dd><code>${status.cluster}</code></dd></div>
        <div><dt>Roster</dt><dd>epoch ${status.roster_epoch}, expires ${new Date(status.roster_expires_unix_s * 1000).toLocaleDateString()}</dd></div>
        <div><dt>Evidence</dt><dd>${LEVELS[status.level] ?? status.level}; the policy asks for ${LEVELS[status.minimum_level] ?? status.minimum_level}</dd></div>
        <div><dt>Plan</dt><dd>${status.parallel.mode}: ${status.parallel.reason}</dd></div>
        <div><dt>Arithmetic</dt><dd>${status.kernel}, K/V in ${status.kv_dtype}${status.why_kernel && `; ${status.why_kernel}`}</dd></div>
        <div><dt>Losses survived</dt><dd>${status.recoveries} ${status.recoveries === 1 ? "loss" : "losses"}, ${count(status.near_ties, "near tie")}</dd></div>
      </dl></section>`;
}
