// Where one step spends its time: a bar of its parts, and a table with the same figures.
import { html } from "./vendor/preact-htm.js";
import { seconds } from "./words.js";

const KINDS = [["wire_s", "wire", "on the wire to"], ["wait_s", "wait", "waiting at"], ["compute_s", "compute", "computing at"], ["seal_s", "seal", "sealing at"]];

export function Step({ path }) {
  if (!path) return null;
  const pieces = path.parts.flatMap((part) => KINDS.map(([field, kind, words]) => ({ kind, told: `${words} ${part.member}`, took: part[field] })));
  const total = pieces.reduce((sum, piece) => sum + piece.took, 0);
  const most = pieces.reduce((one, other) => (other.took > one.took ? other : one));
  const share = (took) => `${Math.round((100 * took) / total)} %`;
  return html`<section aria-labelledby="step"><h2 id="step">The time of a token</h2>
    <div class="card step">
      <p>The last step took <strong>${seconds(path.step_s)}</strong>. The largest part was ${most.told}: ${share(most.took)}.</p>
      <div class="bar" aria-hidden="true">${pieces.filter((piece) => piece.took > 0).map((piece) =>
        html`<span class=${piece.kind} title=${`${piece.told}: ${seconds(piece.took)}`} style=${{ width: `${(100 * piece.took) / total}%` }}></span>`)}</div>
      <div class="scrolled" tabindex="0" role="region" aria-label="Times of the last step"><table>
        <thead><tr><th scope="col">Member</th>${KINDS.map(([field, kind]) => html`<th key=${field} scope="col"><i class=${kind}></i>${kind}</th>`)}</tr></thead>
        <tbody>${path.parts.map((part) => html`<tr><th scope="row">${part.member}</th>${KINDS.map(([field]) =>
          html`<td key=${field}>${part[field] > 0 ? seconds(part[field]) : "-"}</td>`)}</tr>`)}</tbody>
      </table></div>
      <p class="quiet-text">Rows follow the step. "wire" is the way from the member above, with the opening of the seal. Times of peers are placed by the round trip, so half of it may stand on the wrong side of a link.</p>
    </div></section>`;
}
