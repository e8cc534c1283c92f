// llama.cpp's speed on a CPU through node-llama-cpp, one JSON object:
//     node llamacpp.mjs MODEL.gguf [threads] [rounds] [prompt]
//
// Set-up, in a folder from which it is then run: npm init -y && npm i node-llama-cpp@3 --ignore-scripts (prebuilt).
// Decodes 32 tokens after prompts of 32 with 1 and with 8 sequences at a time, and prefills a prompt of 512; medians.
// With `prompt`: prefills a prompt of that many tokens, then decodes 32 tokens of it, one sequence.
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const entry = createRequire(process.cwd() + "/").resolve("node-llama-cpp");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(entry).href);
const [, , modelPath, threadsText = "2", roundsText = "4", promptText] = process.argv;
const threads = Number(threadsText), rounds = Number(roundsText), newTokens = 33, vocabulary = 8000;
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: threads});
const model = await llama.loadModel({modelPath, useMmap: true, gpuLayers: 0});

const prompt = (length, salt) => Array.from({length}, (_, i) => 3 + ((i * 7919 + salt * 131) % vocabulary));
const median = (values) => values.sort((a, b) => a - b)[values.length >> 1];

// Milliseconds at which each token of a sequence came.
async function times(sequence, tokens, count) {
    const found = [];
    await sequence.clearHistory();
    for await (const _ of sequence.evaluate(tokens, {temperature: 0, yieldEogToken: true})) {
        found.push(performance.now());
        if (found.length >= count) break;
    }
    return found;
}

if (promptText) {
    const length = Number(promptText), prefilled = [], intervals = [];
    const context = await model.createContext({contextSize: length + 256, batchSize: 512, threads});
    const sequence = context.getSequence();
    for (let round = 0; round < rounds; round++) {
        const begun = performance.now(), found = await times(sequence, prompt(length, 100 + round), newTokens);
        prefilled.push(length / ((found[0] - begun) / 1000));
        for (let i = 1; i < newTokens; i++) intervals.push(found[i] - found[i - 1]);
    }
    console.log(JSON.stringify({decode_tokens_per_s: 1000 / median(intervals), prefill_tokens_per_s: median(prefilled)}));
    process.exit(0);
}
const decoded = {};
for (const batch of [1, 8]) {
    const context = await model.createContext({contextSize: 1024, sequences: batch, batchSize: 512, threads});
    const sequences = Array.from({length: batch}, () => context.getSequence()), intervals = [];
    for (let round = 0; round <= rounds; round++) {
        const prompts = Array.from({length: batch}, (_, i) => prompt(32, round * batch + i));
        const all = await Promise.all(prompts.map((tokens, i) => times(sequences[i], tokens, newTokens)));
        const from = Math.max(...all.map((t) => t[0])), to = Math.min(...all.map((t) => t[newTokens - 1]));
        for (const t of all) { // the intervals while all of them decode
            for (let i = 1; i < t.length; i++) if (round && t[i - 1] >= from && t[i] <= to) intervals.push(t[i] - t[i - 1]);
        }
    }
    decoded[batch] = (1000 * batch) / median(intervals);
    await context.dispose();
}
const context = await model.createContext({contextSize: 1024, batchSize: 512, threads});
const sequence = context.getSequence(), prefilled = [];
for (let round = 0; round <= rounds; round++) {
    const begun = performance.now(), [first] = await times(sequence, prompt(512, 100 + round), 1);
    if (round) prefilled.push(512 / ((first - begun) / 1000));
}
console.log(JSON.stringify({decode_tokens_per_s: decoded, long_prefill_tokens_per_s: median(prefilled)}));
process.exit(0);
