// LangChain's models as n8n makes them from its nodes, with their fields as they are set by default.
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOllama } from "@langchain/ollama";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { CALLER_URL, MODEL, QUESTION, URL_, WEATHER, check, run } from "./common.mjs";

const sampling = { temperature: 0, topP: 1, frequencyPenalty: 0, presencePenalty: 0 };
const openai = (url, model, more) => new ChatOpenAI({
  model, apiKey: "-", timeout: 60000, maxRetries: 0, maxTokens: -1, ...sampling, ...more, configuration: { baseURL: `${url}/v1` },
});
const ollama = (url, model) => new ChatOllama({
  model, baseUrl: url, ...sampling, topK: -1, keepAlive: "5m", numBatch: 512, numCtx: 2048, numGpu: -1, mainGpu: 0, numPredict: -1,
  numThread: 0, repeatPenalty: 1, lowVram: false, useMMap: true, useMLock: false, vocabOnly: false, penalizeNewline: true,
});
const Day = z.object({ day: z.enum(["Monday", "Friday"]) });
const weather = tool(({ city }) => `rain in ${city}`, {
  name: "get_weather", description: "The weather", schema: z.object({ city: z.string() }),
});

async function agent(model) {
  const bound = model.bindTools([weather]);
  const turns = [new HumanMessage(WEATHER)];
  turns.push(await bound.invoke(turns));
  const [call] = turns[1].tool_calls;
  turns.push(new ToolMessage({ content: await weather.invoke(call.args), tool_call_id: call.id }));
  check((await bound.invoke(turns)).text === "It rains.", turns);
}

async function texts(model) {
  check((await model.invoke(QUESTION)).text.includes("Friday"));
  let text = "";
  for await (const chunk of await model.stream(QUESTION)) text += chunk.text;
  check(text.includes("Friday"), text);
  check((await model.withStructuredOutput(Day).invoke(QUESTION)).day);
}

await run({
  "Chat Completions": () => texts(openai(URL_, MODEL)),
  "Chat Completions: tools": () => agent(openai(CALLER_URL, "caller")),
  "Responses": () => texts(openai(URL_, MODEL, { useResponsesApi: true })),
  "Responses: tools": () => agent(openai(CALLER_URL, "caller", { useResponsesApi: true })),
  "Ollama's chat": () => texts(ollama(URL_, MODEL)),
  "Ollama's chat: tools": () => agent(ollama(CALLER_URL, "caller")),
});
