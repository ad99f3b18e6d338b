"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const charts = document.getElementById("charts");
const svg = charts.querySelector("svg");
const cursor = svg.querySelector(".cursor");
const now = document.getElementById("now");
const { end_s, unit, unit_s, left, right, width } = data.axis;
const shown = data.policies.map(() => true);
let at = null;

/** The index of the last moment that is not after that one; -1 when there is none. */
function last(moments, at_s) {
  let low = 0, high = moments.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (moments[middle] <= at_s) low = middle + 1; else high = middle;
  }
  return low - 1;
}

const number = (value) => value.toLocaleString("en", value < 1000 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 0 });
const time = (at_s) => `${Number((at_s / unit_s).toFixed(unit_s === 1 ? 1 : 2))} ${unit}`;

function element(name, className, text) {
  const svgName = name === "tspan";
  const made = svgName ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  made.setAttribute("class", className);
  made.textContent = text;
  return made;
}

/** What each visible line of a panel is at that moment: one list per policy. */
function readings(panel, at_s) {
  const texts = new Map();
  for (const series of panel.series) {
    if (series.policy >= 0 && !shown[series.policy]) continue;
    const value = series.values[last(series.at_s, at_s)];
    const before = texts.get(series.policy) ?? [];
    const text = value == null ? "–" : number(value);
    if (!before.length || before[0] !== text) before.push(before.length || series.policy < 0 ? `${series.name} ${text}` : text);
    texts.set(series.policy, before);
  }
  return texts;
}

function showPanel(panel, at_s) {
  const read = svg.querySelector(`[data-key="${panel.key}"] .read`);
  read.replaceChildren();
  for (const [policy, texts] of readings(panel, at_s)) {
    if (policy >= 0) read.append(element("tspan", `own p${policy % 8}`, "   ■ "), `${data.policies[policy]} `);
    read.append(texts.join(", "));
  }
}

function decisionAt(policy, at_s) {
  const decisions = data.decisions[policy];
  return decisions[last(decisions.map((each) => each.at_s), at_s)];
}

function show(at_s) {
  at = Math.min(Math.max(at_s, 0), end_s);
  const x = left + (right - left) * at / end_s;
  cursor.setAttribute("d", `M${x} 0V${svg.viewBox.baseVal.height}`);
  data.panels.forEach((panel) => showPanel(panel, at));
  const lines = [time(at)];
  now.replaceChildren(element("p", "", ""));
  now.firstChild.append(element("b", "", `At ${time(at)}`), ", decided last:");
  data.policies.forEach((policy, index) => {
    if (!shown[index]) return;
    const decision = decisionAt(index, at);
    const text = decision ? `${policy}, ${time(decision.at_s)}: ${decision.text}` : `${policy}: nothing yet`;
    const line = element("p", "", "");
    line.append(element("i", `swatch p${index % 8}`, ""), text);
    now.append(line);
    lines.push(text);
  });
  charts.setAttribute("aria-valuenow", at.toFixed(1));
  charts.setAttribute("aria-valuetext", lines.join("; "));
}

/** The next decision of a visible policy in that direction. */
function nextDecision(direction) {
  const all = data.decisions.flatMap((each, policy) => shown[policy] ? each.map((one) => one.at_s) : []);
  const ahead = all.filter((each) => (each - at) * direction > 1e-6 && each <= end_s);
  return ahead.length ? (direction > 0 ? Math.min(...ahead) : Math.max(...ahead)) : at;
}

charts.addEventListener("pointermove", (event) => {
  const box = svg.getBoundingClientRect();
  const x = (event.clientX - box.left) / box.width * width;
  show((x - left) / (right - left) * end_s);
});

charts.addEventListener("keydown", (event) => {
  const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const edge = { Home: 0, End: end_s }[event.key];
  if (direction === undefined && edge === undefined) return;
  event.preventDefault();
  at ??= 0;
  show(edge ?? (event.shiftKey ? nextDecision(direction) : at + direction * end_s / 200));
});

document.querySelectorAll("[data-switch]").forEach((box) => box.addEventListener("change", () => {
  const policy = Number(box.dataset.switch);
  shown[policy] = box.checked;
  document.querySelectorAll(`svg [data-policy="${policy}"], details[data-policy="${policy}"]`)
    .forEach((each) => each.classList.toggle("off", !box.checked));
  if (at !== null) show(at);
}));
