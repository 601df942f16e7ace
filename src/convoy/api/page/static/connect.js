// Settings for agents and SDKs, to copy. A key never stands in them.
import { html, useState } from "./vendor/preact-htm.js";

const KEY = "YOUR_KEY";
// A provider chooses its models' names, and the settings are pasted into shells and programs.
const PASTABLE = /^[\w.:/@+-]+$/;

const SETTINGS = (origin, model, ofCoordinator) => [
  ["curl", `curl ${origin}/v1/chat/completions \\\n  -H "Authorization: Bearer ${KEY}" -H "Content-Type: application/json" \\\n  -d '{"model": "${model}", "messages": [{"role": "user", "content": "What is 2+3?"}]}'`],
  ["Python, openai", `from openai import OpenAI\n\nclient = OpenAI(base_url="${origin}/v1", api_key="${KEY}")\nreply = client.chat.completions.create(\n    model="${model}", messages=[{"role": "user", "content": "What is 2+3?"}]\n)\nprint(reply.choices[0].message.content)`],
  ["Python, anthropic", `from anthropic import Anthropic\n\nclient = Anthropic(base_url="${origin}", api_key="${KEY}")\nreply = client.messages.create(\n    model="${model}", max_tokens=200, messages=[{"role": "user", "content": "What is 2+3?"}]\n)\nprint(reply.content[0].text)`],
  ["JavaScript, openai", `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${origin}/v1", apiKey: "${KEY}" });\nconst reply = await client.chat.completions.create({\n  model: "${model}", messages: [{ role: "user", content: "What is 2+3?" }],\n});\nconsole.log(reply.choices[0].message.content);`],
  ["Coding agents", `# writes the settings, and starts the agent on this server\nconvoy launch claude --url ${origin}\nconvoy launch codex --url ${origin}\nconvoy launch opencode --url ${origin}\nconvoy launch cline --url ${origin}`],
  ...(ofCoordinator ? OF_COORDINATOR(origin) : OF_HEAD(origin)),
];
const OF_HEAD = (origin) => [["Terminal", `convoy chat --url ${origin}\nconvoy status --url ${origin}`], ["Ollama clients", `export OLLAMA_HOST=${origin}`]];
const OF_COORDINATOR = (origin) => [
  ["Sealed, through a proxy", `# beside your tools: the coordinator reads no text, and tools use http://127.0.0.1:8770/v1\nconvoy proxy ${origin} --api-key-file FILE --trust-provider KEY_OF_A_PROVIDER`],
  ["Terminal", `convoy chat --url ${origin} --api-key-file FILE`],
];

function Setting({ name, text }) {
  const [said, setSaid] = useState("");
  const copy = () => navigator.clipboard.writeText(text).then(() => setSaid("Copied"), () => setSaid("Select the text to copy it"));
  return html`<section class="card setting"><div class="row"><h2>${name}</h2><span role="status">${said}</span>
    <button class="quiet" onClick=${copy} aria-label=${`Copy the settings for ${name}`}>Copy</button></div>
    <pre tabindex="0" aria-label=${`Settings for ${name}`}><code>${text}</code></pre></section>`;
}

export function Connect({ status, models, rights }) {
  const model = [...models.map((one) => one.id), status.model].find((id) => PASTABLE.test(id ?? "")) ?? "MODEL";
  const ofCoordinator = rights.server === "coordinator";
  return html`<h1>Connect</h1>
    <p>The address is <code>${location.origin}/v1</code>, the model <code>${model}</code>.
      ${rights.needs_key ? html` Replace <code>${KEY}</code> by a key of this server: <code>${ofCoordinator ? "convoy coordinator keys --add ACCOUNT" : "convoy keys new"}</code> makes one.` : html` This head asks for no key, but most clients want some text in its place.`}</p>
    <div class="settings">${SETTINGS(location.origin, model, ofCoordinator).map(([name, text]) => html`<${Setting} key=${name} name=${name} text=${text} />`)}</div>`;
}
