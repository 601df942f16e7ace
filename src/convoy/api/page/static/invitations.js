// Machines that wait to be let in, each with the code that its screen must show too. Only operators see them.
import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { answerInvitation, readInvitations } from "./server.js";
import { pairs } from "./words.js";

const EVERY_MS = 2000;

function Waiting({ one, onAnswer }) {
  const minutes = Math.max(1, Math.ceil((one.expires_unix_s - Date.now() / 1000) / 60));
  return html`<li class="card invitation">
    <h3>${one.name} asks to be let in</h3>
    <p class="code"><span class="hidden">Code: </span>${one.code}</p>
    <p>Does the screen of ${one.name} show the same code? If not, refuse it: another machine has taken its place.</p>
    <p class="quiet-text">It would be a member at ${one.address}, and called from ${one.called_from}. Identity <code title=${one.fingerprint}>${pairs(one.fingerprint)}</code>. It waits ${minutes} more min.</p>
    <div class="row"><button onClick=${() => onAnswer(one, true)}>The codes are the same: let it in</button>
      <button class="quiet" onClick=${() => onAnswer(one, false)}>Refuse it</button></div>
  </li>`;
}

export function Invitations() {
  const [waiting, setWaiting] = useState([]);
  const [said, setSaid] = useState("");
  const [problem, setProblem] = useState("");
  const look = () => readInvitations().then(setWaiting, () => setWaiting([]));
  useEffect(() => {
    // A page that is not seen asks for nothing.
    const timer = setInterval(() => document.hidden || look(), EVERY_MS);
    look();
    return () => clearInterval(timer);
  }, []);
  const answer = async (one, approves) => {
    setProblem("");
    try {
      await answerInvitation(one, approves);
      setSaid(approves ? html`You let ${one.name} in. It is a member once <code>convoy invite</code> has signed the roster.` : `You refused ${one.name}.`);
    } catch (error) {
      setProblem(error.message);
    }
    await look();
  };
  return html`<section class="invitations" aria-label="Invitations" aria-live="polite">
    ${problem && html`<p class="notice bad" role="alert">${problem}</p>`}
    ${waiting.length > 0 && html`<ul>${waiting.map((one) => html`<${Waiting} key=${one.id} one=${one} onAnswer=${answer} />`)}</ul>`}
    ${said && !waiting.length && html`<p class="notice good">${said}</p>`}
  </section>`;
}
