import { start } from "./app.js";

start(document.getElementById("app"), JSON.parse(document.getElementById("data").textContent));
