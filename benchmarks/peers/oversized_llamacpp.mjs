// llama.cpp decoding the tokens of a text through node-llama-cpp: node oversized_llamacpp.mjs MODEL.gguf IDS.json PROMPT THREADS
//
// Set up as `llamacpp.mjs` is. The weights are mapped. Each token of the text after the prompt is one step of one
// sequence; the last line is one JSON object, with the seconds of every step.
import {readFileSync} from "node:fs";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const entry = createRequire(process.cwd() + "/").resolve("node-llama-cpp");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(entry).href);
const [, , modelPath, idsPath, promptText, threadsText] = process.argv;
const ids = JSON.parse(readFileSync(idsPath, "utf8")), prompt = Number(promptText);
const threads = Number(threadsText);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: threads});
const model = await llama.loadModel({modelPath, useMmap: true, gpuLayers: 0});
const context = await model.createContext({contextSize: 256, batchSize: 64, threads});
const sequence = context.getSequence(), seconds = [];
await sequence.evaluateWithoutGeneratingNewTokens(ids.slice(0, prompt));
for (const id of ids.slice(prompt)) {
    const begun = performance.now();
    for await (const _ of sequence.evaluate([id], {temperature: 0, yieldEogToken: true})) break;
    seconds.push((performance.now() - begun) / 1000);
    // the token that was drawn has not been evaluated: the next step goes on with the text
}
console.log(JSON.stringify({seconds}));
process.exit(0);
