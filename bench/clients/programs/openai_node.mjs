// The OpenAI client for Node.
import OpenAI from "openai";

const [URL_, MODEL, CALLER_URL] = process.argv.slice(2);
const QUESTION = "The film night is on Friday at 20:00.\n\nWhen is the film night?";
const messages = [{ role: "user", content: QUESTION }];
const connect = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0 });
const client = connect(URL_);
const caller = connect(CALLER_URL);

function check(fact, what) {
  if (!fact) throw new Error(`not as expected: ${JSON.stringify(what)}`);
}

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
      model: "caller", messages: [{ role: "user", content: "How is the weather in Bern?" }],
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

for (const [feature, attempt] of Object.entries(features)) {
  let outcome = "works";
  let detail = "";
  try {
    await attempt();
  } catch (error) {
    outcome = [400, 404].includes(error.status) ? "refused" : "fails";
    detail = `${error.name}: ${error.message}`.slice(0, 300);
  }
  console.log(JSON.stringify({ feature, outcome, detail }));
}
