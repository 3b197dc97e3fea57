// The OpenAI client for Node.
import OpenAI from "openai";
import { CALLER_URL, MODEL, QUESTION, URL_, WEATHER, check, run } from "./common.mjs";

const messages = [{ role: "user", content: QUESTION }];
const connect = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0 });
const client = connect(URL_);
const caller = connect(CALLER_URL);

const features = {
  "chat": async () => {
    const done = await client.chat.completions.create({ model: MODEL, messages });
    check(done.choices[0].message.content.includes("Friday"), done);
  },
  "stream": async () => {
    let text = "";
    const stream = await client.chat.completions.create({ model: MODEL, messages, stream: true });
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    check(text.includes("Friday"), text);
  },
  "structured output (json_schema)": async () => {
    const schema = {
      type: "object", properties: { day: { enum: ["Friday", "Monday"] } }, required: ["day"], additionalProperties: false,
    };
    const done = await client.chat.completions.create({
      model: MODEL, messages, max_tokens: 200, response_format: { type: "json_schema", json_schema: { name: "plan", schema } },
    });
    check(JSON.parse(done.choices[0].message.content).day, done);
  },
  "tools run by the client (runTools)": async () => {
    const runner = caller.chat.completions.runTools({
      model: "caller", messages: [{ role: "user", content: WEATHER }],
      tools: [{
        type: "function",
        function: {
          name: "get_weather", parse: JSON.parse, function: () => "rain",
          parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
        },
      }],
    });
    check((await runner.finalContent()) === "It rains.", await runner.finalContent());
  },
  "Responses: stream": async () => {
    const stream = client.responses.stream({ model: MODEL, input: QUESTION });
    const done = await stream.finalResponse();
    check(done.output_text.includes("Friday"), done);
  },
};

await run(features);
