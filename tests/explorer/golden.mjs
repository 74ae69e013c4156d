// Calls functions of the explorer's modules: reads [[file, name, arguments], ...] from stdin, writes the results.
// Infinity and NaN travel as texts, because JSON has none.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const revive = (_, value) => (["Infinity", "-Infinity", "NaN"].includes(value) ? Number(value) : value);
const replace = (_, value) => (typeof value === "number" && !Number.isFinite(value) ? String(value) : value);
const folder = process.argv[2];
const calls = JSON.parse(readFileSync(0, "utf8"), revive);
const results = [];
for (const [file, name, given] of calls) {
  const module = await import(pathToFileURL(`${folder}/${file}`));
  try {
    results.push({ value: module[name](...given) });
  } catch (error) {
    results.push({ error: error.message, at: error.at });
  }
}
process.stdout.write(JSON.stringify(results, replace));
