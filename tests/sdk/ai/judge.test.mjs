// Judge a server with the AI SDK's three providers. Each speaks another of the server's APIs.
//
// CLUSTER_URL is a cluster of random weights: what it must say is enforced by a grammar. SCRIPTED_URL says what
// the last message of the user tells it to say. Both have the model MODEL.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const { CLUSTER_URL, SCRIPTED_URL, MODEL } = process.env;
// The SDK's warnings about options that a provider leaves out.
globalThis.AI_SDK_LOG_WARNINGS = false;

const PROVIDERS = {
  "openai-compatible": (url) =>
    createOpenAICompatible({
      name: "convoy",
      baseURL: `${url}/v1`,
      apiKey: "unused",
      includeUsage: true,
      supportsStructuredOutputs: true,
    })(MODEL),
  openai: (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: "unused" }).responses(MODEL),
  anthropic: (url) => createAnthropic({ baseURL: `${url}/v1`, apiKey: "unused" })(MODEL),
};
const CITY = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Bern"] }, days: { type: "array", items: { type: "boolean" }, maxItems: 2 } },
  required: ["city", "days"],
  additionalProperties: false,
};
// The answer holds its reasoning in the form that the request gives it, and the SDK sends it back.
const OPTIONS = {
  openai: { store: false, forceReasoning: true, reasoningSummary: "auto", strictJsonSchema: true },
  anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } },
};

// Random weights may open a reasoning before a forced answer and never end it.
const NO_REASONING = {
  convoy: { reasoningEffort: "none" },
  openai: { forceReasoning: true, reasoningEffort: "none", store: false, strictJsonSchema: true },
  anthropic: { thinking: { type: "disabled" } },
};

const forecast = (execute) =>
  tool({ description: "Return the forecast of a city.", inputSchema: jsonSchema(CITY), ...(execute && { execute }) });

function checkCity(value) {
  assert.deepEqual(Object.keys(value).sort(), ["city", "days"]);
  assert.ok(CITY.properties.city.enum.includes(value.city));
  assert.ok(value.days.length <= 2 && value.days.every((day) => typeof day === "boolean"));
}

function checkUsage(usage) {
  assert.ok(usage.inputTokens > 0);
  assert.ok(usage.outputTokens > 0);
  assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
}

for (const [name, provide] of Object.entries(PROVIDERS)) {
  const model = provide(CLUSTER_URL);
  const scripted = provide(SCRIPTED_URL);
  const same = { model, maxRetries: 0, temperature: 0 };

  test(`${name}: a whole text and a streamed one are the same, with usage`, async () => {
    const asked = { ...same, prompt: "Tell me about rain.", maxOutputTokens: 12 };
    const whole = await generateText(asked);
    assert.equal(whole.finishReason, "length");
    assert.equal(whole.usage.outputTokens, 12);
    checkUsage(whole.usage);
    const stream = streamText(asked);
    const parts = [];
    for await (const part of stream.textStream) parts.push(part);
    assert.ok(parts.length > 1);
    assert.equal(parts.join(""), whole.text);
    assert.equal(await stream.finishReason, "length");
    const usage = await stream.usage;
    assert.deepEqual([usage.inputTokens, usage.outputTokens], [whole.usage.inputTokens, 12]);
  });

  test(`${name}: a forced call is valid, whole and streamed`, async () => {
    for (const toolChoice of ["required", { type: "tool", toolName: "forecast" }]) {
      const asked = {
        ...same,
        prompt: "How is the weather?",
        tools: { forecast: forecast() },
        toolChoice,
        maxOutputTokens: 200,
        providerOptions: NO_REASONING,
      };
      const whole = await generateText(asked);
      assert.equal(whole.finishReason, "tool-calls");
      assert.equal(whole.toolCalls[0].toolName, "forecast");
      checkCity(whole.toolCalls[0].input);
      const stream = streamText(asked);
      const kinds = new Set();
      for await (const part of stream.stream) kinds.add(part.type);
      assert.ok(kinds.has("tool-input-delta"), [...kinds].join());
      const [call] = await stream.toolCalls;
      checkCity(call.input);
      // That provider sends no temperature to a model of reasoning, so its two answers may differ.
      if (name !== "openai") assert.deepEqual(call.input, whole.toolCalls[0].input);
    }
  });

  test(`${name}: a tool's result goes back, and the answer follows`, async () => {
    const cities = [];
    const done = await generateText({
      ...same,
      prompt: "How is the weather?",
      tools: {
        forecast: forecast(async ({ city }) => {
          cities.push(city);
          return `Rain in ${city}.`;
        }),
      },
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
      stopWhen: stepCountIs(2),
      maxOutputTokens: 200,
      providerOptions: NO_REASONING,
    });
    assert.equal(done.steps.length, 2);
    assert.ok(cities.length > 0);
    assert.deepEqual(done.steps[1].toolCalls, []);
    assert.ok(done.steps[1].usage.inputTokens > done.steps[0].usage.inputTokens);
  });

  test(`${name}: an object has its schema`, async () => {
    const asked = {
      ...same,
      prompt: "Which city?",
      output: Output.object({ schema: jsonSchema(CITY) }),
      maxOutputTokens: 200,
      providerOptions: NO_REASONING,
    };
    checkCity((await generateText(asked)).output);
    checkCity(await streamText(asked).output);
  });

  test(`${name}: a prompt that was read before is in the usage as cached`, async () => {
    const asked = { ...same, prompt: `${name} says: ${"all work and no play. ".repeat(40)}`, maxOutputTokens: 2 };
    await generateText(asked);
    const { usage } = await generateText(asked);
    assert.ok(usage.inputTokenDetails.cacheReadTokens >= 0.9 * usage.inputTokens);
  });

  test(`${name}: reasoning is apart from the text, and goes back`, async () => {
    const prompt = "<think>\nTwo and three.\n</think>\n\nIt is 5.";
    const asked = { model: scripted, maxRetries: 0, maxOutputTokens: 200, providerOptions: OPTIONS };
    const whole = await generateText({ ...asked, prompt });
    assert.equal(whole.reasoningText, "Two and three.");
    assert.equal(whole.text, "It is 5.");
    const stream = streamText({ ...asked, prompt });
    const parts = { "reasoning-delta": "", "text-delta": "" };
    for await (const part of stream.stream) if (part.type in parts) parts[part.type] += part.text;
    assert.deepEqual(parts, { "reasoning-delta": "Two and three.", "text-delta": "It is 5." });
    const messages = [
      { role: "user", content: prompt },
      ...whole.responseMessages,
      { role: "user", content: "Are you sure?" },
    ];
    assert.equal((await generateText({ ...asked, messages })).text, "Are you sure?");
  });

  test(`${name}: text and calls that the model chose come apart`, async () => {
    const call = '<tool_call>\n{"name": "forecast", "arguments": {"city": "Bern", "days": [true]}}\n</tool_call>';
    const stream = streamText({
      model: scripted,
      maxRetries: 0,
      prompt: `Let me look.\n${call}`,
      tools: { forecast: forecast() },
      maxOutputTokens: 400,
    });
    assert.equal(await stream.text, "Let me look.");
    assert.deepEqual((await stream.toolCalls)[0].input, { city: "Bern", days: [true] });
    assert.equal(await stream.finishReason, "tool-calls");
  });

  test(`${name}: a prompt that does not fit is an error of the caller`, async () => {
    const asked = { ...same, prompt: "x ".repeat(40_000), maxOutputTokens: 8 };
    await assert.rejects(generateText(asked), (error) => error.statusCode === 400 && !error.isRetryable);
  });
}

test("openai: an item that the server stores goes back as a reference", async () => {
  const bodies = [];
  const provide = (url) =>
    createOpenAI({
      baseURL: `${url}/v1`,
      apiKey: "unused",
      fetch: (target, given) => {
        bodies.push(given.body);
        return fetch(target, given);
      },
    }).responses(MODEL);
  const asked = { model: provide(SCRIPTED_URL), maxRetries: 0, maxOutputTokens: 200 };
  const first = await generateText({ ...asked, prompt: "Say moon." });
  const messages = [
    { role: "user", content: "Say moon." },
    ...first.responseMessages,
    { role: "user", content: "Again." },
  ];
  assert.equal((await generateText({ ...asked, messages })).text, "Again.");
  assert.ok(bodies.at(-1).includes("item_reference") && !bodies.at(-1).includes('"assistant"'));
  // A server without a store says that it has no such item, and how to send it.
  const unstored = generateText({ ...asked, model: provide(CLUSTER_URL), messages });
  await assert.rejects(unstored, (error) => error.statusCode === 404 && /store: false/.test(error.message));
});
