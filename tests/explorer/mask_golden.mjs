// Masks of the explorer as dense matrices: reads [[text, queries, keys], ...], writes rows of 0 and 1, or the error.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const { blockCounts, blockTable, countPairs, denseMask, parseMask } = await import(pathToFileURL(`${process.argv[2]}/mask_expression.js`));
const results = JSON.parse(readFileSync(0, "utf8")).map(([text, queries, keys]) => {
  try {
    const mask = parseMask(text);
    const blocks = blockCounts(mask, queries, keys, 4);
    return { dense: denseMask(mask, queries, keys).map((row) => row.map(Number)), count: countPairs(mask, queries, keys), blocks: blocks.counts.map((row) => [...row]), size: blocks.size, table: blockTable(mask, queries, keys, 4) };
  } catch (error) {
    return { error: error.message, at: error.at };
  }
});
process.stdout.write(JSON.stringify(results));
