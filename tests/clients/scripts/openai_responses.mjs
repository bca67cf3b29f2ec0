// The `openai` client for Node: `responses.*`.
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { check, few, model } from "./checks.mjs";

const client = new OpenAI();
const look = {
  type: "function",
  name: "look",
  parameters: { type: "object", properties: { far: { type: "boolean" } }, required: ["far"] },
  strict: true,
};
const answer = z.object({ yes: z.boolean() });

const first = await client.responses.create({ model, input: "hello", max_output_tokens: few });
check("create", first.output_text);
const kinds = [];
for await (const event of await client.responses.create({ model, input: "hello", max_output_tokens: few, stream: true }))
  kinds.push(event.type);
check("create, streamed", ["response.completed", "response.incomplete"].includes(kinds.at(-1)));
const text = { format: zodTextFormat(answer, "answer") };
const stream = client.responses.stream({ model, input: "hello", text });
let deltas = "";
for await (const event of stream) if (event.type === "response.output_text.delta") deltas += event.delta;
const final = await stream.finalResponse();
check("stream", final.output_text === deltas && typeof final.output_parsed.yes === "boolean");
const parsed = await client.responses.parse({ model, input: "hello", text });
check("parse", typeof parsed.output_parsed.yes === "boolean");
const called = await client.responses.create({ model, input: "hello", tools: [look], tool_choice: "required" });
const call = called.output.find((item) => item.type !== "reasoning");
check("a function call", call.type === "function_call" && call.name === "look");
const after = await client.responses.create({
  model,
  input: [{ type: "function_call_output", call_id: call.call_id, output: "the sea" }],
  previous_response_id: called.id,
  max_output_tokens: few,
});
check("its output, by previous_response_id", after.output_text);
check("retrieve", (await client.responses.retrieve(first.id)).output_text === first.output_text);
const listed = await client.responses.inputItems.list(first.id);
check("inputItems", listed.data[0].content[0].text === "hello");
check("inputTokens", (await client.responses.inputTokens.count({ model, input: "hello" })).input_tokens > 0);
await client.responses.delete(first.id);
const gone = await client.responses.retrieve(first.id).catch((error) => error);
check("delete", gone.status === 404);
