"use strict";
/* Whatever comes from the deployment is text: it gets into the page by textContent alone. */
const byId = (name) => document.getElementById(name);
const KEY = "dynaplan-page-key";
const SILENT_MS = 12000;
const ENGINES = ["decode", "prefill"];
const SIGNED_OUT = "Not signed in: open the address that `dynaplan ui` prints.";

// -- the session: its key comes behind the # of the address, and stays in this browser, for this port alone

if (location.hash.length > 1) {
  localStorage.setItem(KEY, location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
}
const headers = (more = {}) => ({ "X-Dynaplan-Key": localStorage.getItem(KEY) ?? "", ...more });
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

function connection(state, text) {
  if (document.body.className !== state) document.body.className = state;
  if (byId("connected").textContent !== text) byId("connected").textContent = text;
}

// -- events: one stream, which begins again when it ends

let stream = null, seenAt = null, hurry = () => {};

const shown = () => {
  const span = document.querySelector("input[name=span]:checked").value;
  return new URLSearchParams({ span, width: Math.round(byId("charts").clientWidth) || 1000 });
};

async function follow() {
  for (let wait_s = 1; ; wait_s = Math.min(2 * wait_s, 10)) {
    const own = stream = new AbortController();
    const before = seenAt;
    try {
      const response = await fetch(`/ui/events?${shown()}`, { headers: headers(), signal: own.signal, cache: "no-store" });
      if (response.status === 401) return connection("lost", SIGNED_OUT);
      if (!response.ok) throw new Error((await response.text()).trim());
      await readEvents(response, own);
    } catch (error) {
      if (own.isReplaced) { wait_s = 0.5; continue; }
    }
    if (seenAt !== before) wait_s = 1;
    const since = seenAt === null ? "" : ` This is as of ${seenAt.toLocaleTimeString()}.`;
    connection("lost", `Connection lost; trying again in ${wait_s} s.${since}`);
    await Promise.race([sleep(1000 * wait_s), new Promise((done) => { hurry = done; })]);
  }
}

async function readEvents(response, own) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", watchdog = 0;
  const alive = () => { clearTimeout(watchdog); watchdog = setTimeout(() => own.abort(), SILENT_MS); };
  alive();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      alive();
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      parts.forEach(take);
    }
  } finally {
    clearTimeout(watchdog);
  }
}

function take(part) {
  const [event, data] = part.split("\n", 2).map((line) => line.slice(line.indexOf(": ") + 2));
  const taken = { look: showLook, decisions: showDecisions, charts: loadCharts, trouble: showTrouble }[event];
  taken?.(JSON.parse(data));
}

function showTrouble(text) {
  if (text) connection("lost", text);
}

/** Begins the stream again, with other charts. */
function again() {
  if (stream) { stream.isReplaced = true; stream.abort(); }
}
addEventListener("online", () => hurry());
document.addEventListener("visibilitychange", () => hurry());
byId("spans").addEventListener("change", again);
let resized = 0, chartWidth = 0;
new ResizeObserver(() => {
  clearTimeout(resized);
  resized = setTimeout(() => {
    const width = byId("charts").clientWidth;
    if (chartWidth && Math.abs(width - chartWidth) > 40) again();
    chartWidth = width;
  }, 300);
}).observe(byId("charts"));

// -- what a look shows

const text = (node, value) => { if (node.textContent !== value) node.textContent = value; };
const known = (value, unit = "") => value == null ? "–" : `${number(value)}${unit}`;
const gib = (bytes, digits = 1) => (bytes / 2 ** 30).toFixed(digits);
const clock = (s) => {
  const two = (value) => String(Math.floor(value)).padStart(2, "0");
  return s >= 86400 ? `${Math.floor(s / 86400)} d ${two(s / 3600 % 24)} h` : s >= 3600 ? `${Math.floor(s / 3600)}:${two(s / 60 % 60)}:${two(s % 60)}` : `${two(s / 60)}:${two(s % 60)}`;
};

/** Makes the children of a parent those of the items, each kept as long as its key is there. */
function keyed(parent, items, keyOf, make, update) {
  const kept = parent.kept ??= new Map();
  const keys = new Set(items.map(keyOf));
  for (const [key, node] of kept) if (!keys.has(key)) { node.remove(); kept.delete(key); }
  items.forEach((item, index) => {
    const key = keyOf(item);
    if (!kept.has(key)) kept.set(key, make(item));
    const node = kept.get(key);
    update(node, item);
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
}

function showLook(look) {
  seenAt = new Date();
  const names = Object.keys(look.on_request ?? {});
  models = names.length ? names : look.models;
  const planned = Object.entries(look.planned_models ?? {}).map(([model, each]) => `policy ${each.policy} for ${model}`);
  const observes = look.observes_only ? ", which only observes" : "";
  const policy = look.policy ? `policy ${look.policy}${observes}` : planned.join(", ") || "no planner";
  hasPlanner = Boolean(look.policy || planned.length);
  connection("live", "Live");
  document.title = `${look.namespace} – dynaplan`;
  text(byId("name"), look.namespace);
  text(byId("service"), [names.length ? "models on request" : look.models.join(", ") || "model not known yet", policy].join("  ·  "));
  for (const name of ["notes", "planners"]) keyed(byId(name), look[name], (line) => line, (line) => element("li", "", line), () => {});
  showLoad(look);
  showRoles(look);
  showModels(look.on_request ?? {});
  showKeys(look.keys ?? []);
  keyed(byId("workers").tBodies[0], look.workers, (row) => row.worker, makeWorker, showWorker);
  showGpus(look);
}

function figure(name, value, unit) {
  const node = byId(name);
  if (node.dataset.shown === `${value}${unit}`) return;
  node.dataset.shown = `${value}${unit}`;
  node.replaceChildren(value, ...(unit && value !== "–" ? [element("small", "", ` ${unit}`)] : []));
}

function showLoad(look) {
  const load = look.load ?? {}, targets = look.targets;
  figure("requests", known(load.requests_per_s), "");
  const rates = look.workers.filter((row) => ENGINES.includes(row.role)).map((row) => row.tokens_per_s).filter((rate) => rate != null);
  const engines = rates.length ? rates.reduce((sum, rate) => sum + rate, 0) : null;
  figure("tokens", known(models.length && look.on_request && Object.keys(look.on_request).length ? load.tokens_per_s : engines), "");
  const unstreamed = load.requests_per_s && load.ttft_mean_ms == null ? "no answer was streamed" : "";
  for (const name of ["ttft", "itl"]) {
    const high = load[`${name}_percentile_ms`], mean = load[`${name}_mean_ms`];
    const target = targets?.[`${name}_ms`], percentile = targets?.[`${name}_percentile`] ?? 95;
    text(byId(`${name}-name`), `${name.toUpperCase()} p${percentile}`);
    figure(name, known(high), "ms");
    const isMet = target == null || high == null ? "" : high <= target ? " met" : " missed";
    byId(name).className = `figure${isMet}`;
    const budget = look.error_budget?.[`${name}_requests`];
    text(byId(`${name}-target`), [target == null ? "" : `target ${number(target)}`, mean == null ? unstreamed : `mean ${number(mean)}`].filter(Boolean).join(", "));
    byId(`${name}-target`).title = budget == null ? "" : `${number(budget)} requests may still miss`;
  }
}

function showRoles(look) {
  const roles = Object.keys(look.desired), onRequest = Object.values(look.on_request ?? {});
  const ready = (role) => look.workers.filter((row) => row.role === role && row.state === "ready").length;
  const sum = (of) => roles.reduce((all, role) => all + of(role), 0);
  const isReady = onRequest.filter((row) => row.state === "ready").length;
  text(byId("ready-name"), onRequest.length ? "Models ready" : "Workers ready");
  if (onRequest.length) figure("ready", String(isReady), `of ${onRequest.length}`);
  else figure("ready", roles.length ? String(sum(ready)) : "–", roles.length ? `of ${sum((role) => look.desired[role])}` : "");
  text(byId("ready-of"), onRequest.length ? waitingFor(onRequest) : roles.map((role) => `${role} ${ready(role)} of ${look.desired[role]}`).join(", "));
  byId("ready").className = `figure${look.is_pending || !roles.length ? "" : roles.every((role) => ready(role) >= look.desired[role]) ? " met" : " missed"}`;
  keyed(byId("roles"), roles.map((role) => ({ role, ready: ready(role), look })), (each) => each.role, makeRole, showRole);
}

function waitingFor(rows) {
  const waiting = rows.reduce((sum, row) => sum + row.waiting, 0);
  return waiting ? `${number(waiting)} ${waiting === 1 ? "request waits" : "requests wait"}` : "nobody waits";
}

function button(name, label, press) {
  const made = element("button", "", name);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", press);
  return made;
}

function makeRole({ role }) {
  const node = element("div", "role", "");
  const hold = button("Hold", "", () => act({ do: hold.textContent === "Hold" ? "hold" : "release", role }));
  hold.className = "hold";
  node.append(
    element("span", "", ""),
    button("−", `One ${role} worker less`, () => act({ do: "scale", role, by: -1 })),
    button("+", `One ${role} worker more`, () => act({ do: "scale", role, by: 1 })),
    hold,
  );
  return node;
}

function showRole(node, { role, ready, look }) {
  text(node.firstChild, `${role}: ${ready} of ${look.desired[role]}${look.is_pending ? ", being carried out" : ""}`);
  const hold = node.querySelector(".hold");
  text(hold, look.holds[role] ? "Release" : "Hold");
  hold.title = look.holds[role] ? "Let the planner decide again" : "Keep the planner from changing this number";
}

// -- models that are loaded on request

const HOLDING = ["starting", "ready", "backoff"];
const MODEL_COLUMNS = ["Model", "State", "Workers", "Memory", "GPUs", "Running", "Waiting", "Requests/s", "Tokens/s", "Watts", "Leaves", ""];
const energy = (power) => power?.wh_per_1000_tokens == null ? "" : `${number(power.wh_per_1000_tokens)} Wh per 1,000 tokens`;

function showModels(rows) {
  const listed = Object.entries(rows);
  byId("models-part").hidden = byId("to-model").hidden = !listed.length;
  keyed(byId("models").tBodies[0], listed, ([name]) => name, makeModel, showModel);
  keyed(byId("model"), listed, ([name]) => name, ([name]) => { const made = element("option", "", name); made.value = name; return made; }, () => {});
}

function makeModel([name]) {
  const row = document.createElement("tr");
  MODEL_COLUMNS.forEach((label) => { const cell = element("td", "", ""); cell.dataset.label = label; row.append(cell); });
  const pin = button("Pin", "", () => act({ do: pin.textContent === "Pin" ? "pin" : "unpin", model: name }));
  pin.className = "pin";
  row.lastChild.append(
    button("Load", `Load ${name}`, () => act({ do: "load", model: name })),
    button("Unload", `Unload ${name}`, () => ask(`Unload ${name}? It finishes its requests, and leaves its memory.`, { do: "unload", model: name })),
    pin,
  );
  return row;
}

function showModel(node, [name, row]) {
  const now_s = Date.now() / 1000;
  const state = row.state === "loading" ? `loading ${clock(Math.max(0, now_s - row.since_unix_s))}${row.load_s ? ` (usually ${clock(row.load_s)})` : ""}` : row.state;
  const leaves = row.is_pinned ? "pinned" : row.state === "ready" && row.leaves_unix_s ? `in ${clock(Math.max(0, row.leaves_unix_s - now_s))}` : "–";
  const workers = (pool) => {
    const number = HOLDING.reduce((sum, each) => sum + (pool.workers[each] ?? 0), 0);
    return pool.max_workers > 1 || row.prefill ? `${number} of ${pool.max_workers}` : String(number);
  };
  const cells = [
    name, state, workers(row) + (row.prefill ? `, prefill ${workers(row.prefill)}` : ""),
    row.memory_bytes ? `${gib(row.memory_bytes)} GiB` : "–", row.gpus.join(",") || "–",
    known(row.in_flight), known(row.waiting), known(row.load?.requests_per_s), known(row.load?.tokens_per_s), known(row.power?.watts), leaves,
  ];
  cells.forEach((value, index) => {
    text(node.children[index], value);
    node.children[index].classList.toggle("none", value === "–");
  });
  node.children[9].title = energy(row.power);
  node.children[1].className = `state-${row.state}`;
  node.children[1].title = row.refusal?.why || row.why || "";
  const pin = node.querySelector(".pin");
  text(pin, row.is_pinned ? "Unpin" : "Pin");
  pin.setAttribute("aria-label", `${pin.textContent} ${name}`);
}

// -- who asks, where requests bear keys

const KEY_COLUMNS = ["Key", "Model", "Of its limits", "Running", "Waiting", "Share"];

function showKeys(keys) {
  byId("keys-part").hidden = !keys.length;
  keyed(byId("keys").tBodies[0], keys, (row) => `${row.key} ${row.model}`, () => {
    const node = document.createElement("tr");
    KEY_COLUMNS.forEach((label) => { const cell = element("td", "", ""); cell.dataset.label = label; node.append(cell); });
    return node;
  }, (node, row) => {
    const limits = row.limits.map((each) => `${each.used} of ${each.limit} ${each.kind}`).join(", ");
    const cells = [row.key, row.model || "–", limits || "–", String(row.running), String(row.waiting), `${Math.round(100 * row.share)}%`];
    cells.forEach((value, index) => {
      text(node.children[index], value);
      node.children[index].classList.toggle("none", value === "–");
    });
  });
}

// -- workers

const COLUMNS = ["Worker", "Role", "State", "GPUs", "Running", "Waiting", "KV", "Tokens/s", "Up", "Restarts", ""];

function makeWorker({ worker, role }) {
  const row = document.createElement("tr");
  COLUMNS.forEach((label) => { const cell = element("td", "", ""); cell.dataset.label = label; row.append(cell); });
  const actions = row.lastChild;
  actions.append(button("Log", `Log of ${worker}`, () => showLog(worker)));
  if (ENGINES.includes(role) && byId("models-part").hidden) {
    actions.append(
      button("Drain", `Drain ${worker}`, () => ask(`Drain ${worker}? It finishes its requests and leaves; one ${role} worker less is asked for.`, { do: "drain", role, worker })),
      button("Restart", `Restart ${worker}`, () => ask(`Restart ${worker}? A new worker first, then this one leaves.`, { do: "restart", worker })),
    );
  }
  return row;
}

function stateOf(row) {
  if (row.is_alive === false) return "dead";
  if (row.waits) return "waiting";
  if (row.draining_s != null) return `draining ${clock(row.draining_s)}`;
  if (row.loading_s != null) return `starting, loading ${clock(row.loading_s)}${row.usually_s == null ? "" : ` (usually ${clock(row.usually_s)})`}`;
  return row.state;
}

function showWorker(node, row) {
  const state = stateOf(row);
  const cells = [
    row.worker, row.role, state, row.gpus.join(",") || "–", known(row.running), known(row.waiting),
    row.kv_usage == null ? "–" : `${(100 * row.kv_usage).toFixed(1)}%`, known(row.tokens_per_s),
    row.uptime_s == null ? "–" : clock(row.uptime_s), String(row.restarts),
  ];
  cells.forEach((value, index) => {
    text(node.children[index], value);
    node.children[index].classList.toggle("none", value === "–");
  });
  node.children[2].className = `state-${state.split(/[ ,]/)[0]}`;
  node.children[2].title = row.waits || row.reason || "";
}

function showGpus(look) {
  const rows = look.gpus.filter((row) => "utilisation" in row);
  const held = look.gpus.filter((row) => row.workers.length).length;
  figure("held", look.gpus.length ? String(held) : "–", look.gpus.length ? `of ${look.gpus.length}` : "");
  const watts = rows.reduce((sum, row) => sum + (row.watts ?? 0), 0);
  text(byId("held-of"), ["held", watts ? `${number(watts)} W` : "", energy(look.power)].filter(Boolean).join(", "));
  const names = [...new Set(look.gpus.map((row) => row.name))];
  text(byId("gpus-title"), names.length === 1 && names[0] ? `${look.gpus.length} GPU${look.gpus.length === 1 ? "" : "s"}, ${names[0]}` : "GPUs");
  byId("gpus-title").hidden = byId("gpus-tile").hidden = !look.gpus.length;
  byId("gpus-section").hidden = !look.gpus.length && !look.model_memory?.length;
  showMemory(look.model_memory ?? []);
  keyed(byId("gpus"), look.gpus, (row) => row.index, () => {
    const item = element("li", "", "");
    const line = element("div", "line", "");
    const meter = document.createElement("meter");
    line.append(element("span", "whose", ""), element("span", "measured", ""));
    item.append(line, meter);
    return item;
  }, (item, row) => {
    const [whose, measured] = item.firstChild.children;
    text(whose, `${row.index}  ${[...row.workers, ...(row.others ?? []), row.reserved].filter(Boolean).join(", ") || "free"}`);
    const parts = [];
    if (row.utilisation != null) parts.push(`${Math.round(100 * row.utilisation)}%`);
    if (row.used_bytes != null && row.memory_bytes) parts.push(`${gib(row.used_bytes, 0)} of ${gib(row.memory_bytes, 0)} GiB`);
    if (row.watts != null) parts.push(`${number(row.watts)} W`);
    text(measured, parts.join(", "));
    const meter = item.lastChild;
    meter.value = row.utilisation ?? 0;
    meter.hidden = row.utilisation == null;
    meter.setAttribute("aria-label", `GPU ${row.index} busy`);
  });
}

// -- who has how much of the memory that models share

function showMemory(devices) {
  byId("memory-title").hidden = !devices.length;
  keyed(byId("memory"), devices, (row) => row.index, () => {
    const item = element("li", "", "");
    item.append(element("div", "line", ""), element("div", "shares", ""), element("p", "muted", ""));
    item.firstChild.append(element("span", "whose", ""), element("span", "measured", ""));
    return item;
  }, (item, row) => {
    const held = [...Object.entries(row.by_model).map(([name, bytes], index) => ({ name, bytes, style: `p${index % 8}` }))];
    if (row.foreign_bytes) held.push({ name: "other programs", bytes: row.foreign_bytes, style: "foreign" });
    const free = Math.max(0, row.total_bytes - held.reduce((sum, each) => sum + each.bytes, 0));
    const [whose, measured] = item.firstChild.children;
    text(whose, row.index < 0 ? "Machine" : `GPU ${row.index}`);
    text(measured, `${gib(free)} of ${gib(row.total_bytes)} GiB free`);
    keyed(item.children[1], held, (each) => each.name, () => element("span", "", ""), (node, each) => {
      node.className = each.style;
      node.style.width = `${100 * each.bytes / Math.max(1, row.total_bytes)}%`;
      node.title = `${each.name} ${gib(each.bytes)} GiB`;
    });
    keyed(item.lastChild, held, (each) => each.name, () => element("span", "", ""), (node, each) => {
      node.className = `share ${each.style}`;
      text(node, `${each.name} ${gib(each.bytes)}`);
    });
  });
}

// -- charts: drawn by the server; a document of its own, which the browser's parser makes and no script runs in

const charts = new Charts(byId("charts"), byId("now"), (at_s) => {
  const { began_s, offset_s } = charts.data.axis;
  return new Date(1000 * (began_s + offset_s + at_s)).toISOString().slice(11, 19);
});

function loadCharts() {
  const request = new XMLHttpRequest();
  request.open("GET", `/ui/charts.svg?${shown()}`);
  Object.entries(headers()).forEach(([name, value]) => request.setRequestHeader(name, value));
  request.responseType = "document";
  request.addEventListener("load", () => {
    const svg = request.responseXML?.documentElement;
    if (request.status !== 200 || svg?.localName !== "svg") return;
    svg.querySelectorAll("script, foreignObject").forEach((each) => each.remove());
    const data = JSON.parse(svg.querySelector("metadata").textContent);
    svg.querySelector("metadata").remove();
    byId("no-charts")?.remove();
    byId("charts").querySelector("svg")?.remove();
    byId("charts").prepend(document.adoptNode(svg));
    if (charts.at !== null) charts.at += charts.data.axis.began_s - data.axis.began_s;
    charts.use(data, svg);
  });
  request.send();
}

function showDecisions(decisions) {
  byId("no-decisions").hidden = decisions.length > 0;
  text(byId("no-decisions"), hasPlanner ? "None yet. The planner decides every adjustment interval." : byId("models-part").hidden ? "None: no planner scales this deployment." : "None yet: requests decide which models are loaded.");
  keyed(byId("decisions"), decisions, (each) => `${each.at_s} ${each.text}`, (each) => {
    const item = element("li", each.is_change ? "change" : "", "");
    const details = document.createElement("details"), summary = document.createElement("summary");
    summary.append(element("time", "", each.time), each.text.replaceAll("->", "→"));
    details.append(summary, element("pre", "", each.why));
    details.addEventListener("toggle", () => { if (details.open && charts.data) charts.show(each.at_s - charts.data.axis.began_s); });
    item.append(details);
    return item;
  }, () => {});
}

// -- actions

function say(said) {
  text(byId("said-text"), said);
  byId("said").hidden = !said;
}
byId("said-close").addEventListener("click", () => say(""));

async function act(action) {
  say("…");
  try {
    const response = await fetch("/ui/act", { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(action) });
    if (!response.ok) return say((await response.text()).trim());
    const done = await response.json();
    say(`${done.command}\n${done.output}`);
  } catch (error) {
    say(`Not done: ${error.message}`);
  }
}

let asked = null;
function ask(question, action) {
  text(byId("ask-text"), question);
  asked = action;
  byId("ask").showModal();
}
byId("ask-yes").addEventListener("click", () => { byId("ask").close(); act(asked); });
byId("ask-no").addEventListener("click", () => byId("ask").close());

// -- a log, followed for as long as it is shown

let logOf = null;
async function showLog(worker) {
  const pane = byId("log-text");
  logOf = worker;
  text(byId("log-title"), worker);
  pane.replaceChildren();
  byId("log").showModal();
  for (let after = -1; logOf === worker && byId("log").open; await sleep(after < 0 ? 0 : 1500)) {
    try {
      const response = await fetch(`/ui/log?${new URLSearchParams({ worker, after })}`, { headers: headers() });
      if (!response.ok) { pane.append((await response.text())); return; }
      const part = await response.json();
      const isAtEnd = pane.scrollTop + pane.clientHeight >= pane.scrollHeight - 8;
      after = part.after;
      if (part.text) pane.append(part.text);
      if (isAtEnd) pane.scrollTop = pane.scrollHeight;
    } catch (error) {
      await sleep(3000);
    }
  }
}
byId("log-close").addEventListener("click", () => byId("log").close());
byId("log").addEventListener("close", () => { logOf = null; });

// -- a prompt

let prompting = null, models = [], hasPlanner = false;
async function prompt() {
  const answer = byId("answer"), pace = byId("pace");
  const content = byId("question").value.trim() || byId("question").placeholder;
  prompting = new AbortController();
  byId("send").disabled = true;
  byId("cancel").disabled = false;
  answer.hidden = false;
  answer.replaceChildren();
  text(pace, "waiting for the first token …");
  const begun = performance.now();
  let first = null, tokens = 0, rest = "";
  try {
    const body = JSON.stringify({ model: byId("model").value || models[0], stream: true, max_tokens: Number(byId("most").value) || 128, messages: [{ role: "user", content }] });
    const response = await fetch("/ui/prompt", { method: "POST", headers: headers({ "Content-Type": "application/json" }), body, signal: prompting.signal });
    if (!response.ok) {
      const said = await response.text();
      let message = said;
      try { message = JSON.parse(said).error.message; } catch { /* not OpenAI's form: as it is */ }
      answer.append(message);
      return text(pace, `status ${response.status}`);
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: {")) continue;
        const said = JSON.parse(line.slice(6));
        const delta = said.choices?.[0]?.delta;
        const piece = delta?.content ?? delta?.reasoning_content;
        if (said.error) answer.append(said.error.message ?? "the answer failed");
        if (!piece) continue;
        first ??= performance.now();
        tokens += 1;
        answer.append(piece);
        answer.scrollTop = answer.scrollHeight;
      }
    }
    const rate = tokens > 1 ? `, ${number((tokens - 1) / Math.max(0.001, (performance.now() - first) / 1000))} tokens/s` : "";
    text(pace, first === null ? "no text came" : `TTFT ${number(first - begun)} ms, ${tokens} tokens${rate}`);
  } catch (error) {
    text(pace, error.name === "AbortError" ? "stopped" : `failed: ${error.message}`);
  } finally {
    byId("send").disabled = false;
    byId("cancel").disabled = true;
  }
}
byId("send").addEventListener("click", prompt);
byId("cancel").addEventListener("click", () => prompting?.abort());
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !byId("send").disabled) { event.preventDefault(); prompt(); }
});

follow();
