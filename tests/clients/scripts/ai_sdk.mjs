// Vercel's `@ai-sdk/openai` with its default API.
import { openai } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { check, few, model } from "./checks.mjs";

const made = openai(model);
check("its default API is responses", made.provider.endsWith(".responses"));
const first = await generateText({ model: made, system: "Be brief.", prompt: "hello", maxOutputTokens: few });
check("an answer", first.text);
check("usage", first.usage.inputTokens > 0 && first.usage.outputTokens > 0);
const streamed = streamText({ model: made, prompt: "hello", maxOutputTokens: few });
let text = "";
for await (const part of streamed.textStream) text += part;
check("a stream", text === (await streamed.text) && text);
const seen = [];
const look = tool({
  description: "Look somewhere.",
  inputSchema: z.object({ far: z.boolean() }),
  execute: async ({ far }) => {
    seen.push(far);
    return "the sea";
  },
});
// The second step refers to the items of the first by their ids.
const steps = await generateText({
  model: made,
  prompt: "hello",
  tools: { look },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  stopWhen: stepCountIs(2),
  maxOutputTokens: 100,
});
check("a tool, and an answer after it", seen.length > 0 && steps.steps.length === 2 && steps.text);
const typed = await generateText({
  model: made,
  prompt: "hello",
  output: Output.object({ schema: z.object({ yes: z.boolean() }) }),
});
check("a typed answer", typeof typed.output.yes === "boolean");
