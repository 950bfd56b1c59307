// Makes calls of Node's `openai`; prints names and results as sdk_calls.py does.
import readline from "node:readline";
import zlib from "node:zlib";
import OpenAI, { AzureOpenAI, toFile } from "openai";

const url = process.argv[2];
const options = { apiKey: "k", maxRetries: 0 };
const oai = new OpenAI({ ...options, baseURL: `${url}/v1` });
const azure = new AzureOpenAI({ ...options, endpoint: url, apiVersion: "2026-01-01" });
const compress = (pack, encoding) => (to, init) => {
  const headers = new Headers(init.headers);
  headers.set("content-encoding", encoding);
  headers.delete("content-length");
  return fetch(to, { ...init, headers, body: pack(init.body) });
};
const zipped = oai.withOptions({ fetch: compress(zlib.gzipSync, "gzip") });
const brotli = oai.withOptions({ fetch: compress(zlib.brotliCompressSync, "br") });
const deflated = oai.withOptions({ fetch: compress(zlib.deflateSync, "deflate") });
const model = "llama";
const ask = { model, messages: [{ role: "user", content: "Grüße, 世界 🦙" }] };
const parameters = { type: "object", properties: { city: { type: "string" }, model: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const wav = () => toFile(Buffer.from(Array.from({ length: 10240 }, (_, at) => at % 256)), "ä.wav");

async function all(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

async function state() {
  const first = await oai.responses.create({ model, input: "Hi", store: true });
  const second = await oai.responses.create({ model, input: "And?", previous_response_id: first.id });
  const third = await oai.responses.retrieve(second.id);
  return [first, second, third, await oai.responses.cancel(third.id), await oai.responses.delete(first.id)];
}

const calls = {
  chat: () => oai.chat.completions.create(ask),
  stream: async () => all(await oai.chat.completions.create({ ...ask, stream: true })),
  tools: () => oai.chat.completions.create({ ...ask, tools }),
  "streamed tools": async () => all(await oai.chat.completions.create({ ...ask, tools, stream: true })),
  "helper of streams": () => oai.chat.completions.stream(ask).finalChatCompletion(),
  "compressed answer": () => oai.chat.completions.create({ ...ask, model: "packed" }),
  "compressed stream": async () => all(await oai.chat.completions.create({ ...ask, model: "packed", stream: true })),
  gzip: () => zipped.chat.completions.create(ask),
  br: () => brotli.chat.completions.create(ask),
  deflate: () => deflated.chat.completions.create(ask),
  "gzip, streamed": async () => all(await zipped.chat.completions.create({ ...ask, stream: true })),
  prompts: () => oai.completions.create({ model, prompt: ["a", "b"], n: 2 }),
  embeddings: () => oai.embeddings.create({ model, input: ["a", "b"] }),
  responses: () => oai.responses.create({ model, input: "Hi" }),
  "responses, streamed": async () => all(await oai.responses.create({ model, input: "Hi", stream: true })),
  "responses with state": state,
  transcription: async () => oai.audio.transcriptions.create({ model, file: await wav() }),
  "transcription, streamed": async () =>
    all(await oai.audio.transcriptions.create({ model, file: await wav(), stream: true })),
  speech: async () => {
    const answer = await oai.audio.speech.create({ model, voice: "alloy", input: "Hi" });
    return Buffer.from(await answer.arrayBuffer()).toString("hex");
  },
  models: async () => all(await oai.models.list()),
  "azure, chat": () => azure.chat.completions.create(ask),
  "a fault of the client": () => oai.chat.completions.create({ ...ask, model: "faulty" }),
};

console.log(JSON.stringify(Object.keys(calls).map((name) => `node: ${name}`)));
for await (const line of readline.createInterface({ input: process.stdin })) {
  let answer;
  try {
    answer = await calls[line.slice("node: ".length)]();
  } catch (fault) {
    answer = { raised: fault.constructor.name, status: fault.status, body: fault.error ?? `${fault}` };
  }
  console.log(JSON.stringify(answer));
}
