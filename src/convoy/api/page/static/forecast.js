// The planner's prediction beside the measurement, and its answers for other members, each in one sentence.
import { html } from "./vendor/preact-htm.js";
import { bytes, perSecond } from "./words.js";

const layersOf = (plan) => Object.entries(plan.layers).map(([name, layers]) => `${layers} on ${name}`).join(", ");

function outcome(plan) {
  if (plan.refused) return `the model does not fit: ${plan.refused}`;
  const rate = plan.tokens_per_s == null ? "" : `, about ${perSecond(plan.tokens_per_s)}`;
  return `${layersOf(plan)}${rate}, room for ${plan.max_kv_tokens.toLocaleString("en")} tokens`;
}

function Rate({ status, forecast }) {
  const { tokens_per_s: rate, limit } = forecast.running;
  const measured = status.lone_step_s ? html`measured <strong>${perSecond(1 / status.lone_step_s)}</strong>` : "not measured yet";
  return html`<p>One request alone: ${rate == null ? "no rate is predicted, because the speed of this machine is not known" : html`predicted <strong>${perSecond(rate)}</strong>`}, ${measured}.${limit && ` What limits it most is ${limit}.`}</p>`;
}

export function Forecast({ status }) {
  const forecast = status.forecast;
  if (!forecast) return null;
  const head = status.stages.find((stage) => stage.head)?.member;
  return html`<section aria-labelledby="forecast"><h2 id="forecast">What if</h2>
    <div class="card">
      <${Rate} status=${status} forecast=${forecast} />
      <ul class="plain">${forecast.losses.map(({ member, plan }) => html`<li key=${member}><strong>If ${member} is lost</strong>: ${outcome(plan)}.</li>`)}
        <li><strong>With one more machine like ${head}, of ${bytes(forecast.added_bytes)}</strong>: ${outcome(forecast.added)}.</li></ul>
      <p class="quiet-text">The planner answers for the present offers of the members. Its rates are for one request with a context of ${forecast.context} tokens${forecast.assumed.length > 0 && html`, and assume ${forecast.assumed.join("; ")}`}.</p>
    </div></section>`;
}
