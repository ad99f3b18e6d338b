"use strict";
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

/** An element with its class and its text; no text is ever taken for HTML. */
function element(name, className, text) {
  const isSvg = name === "tspan";
  const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  if (className) made.setAttribute("class", className);
  made.textContent = text;
  return made;
}

/** Charts that are read at a moment: pointed at, or by the arrow keys. `data` is what core/drawing calls readable. */
class Charts {
  at = null;

  constructor(box, now, time) {
    this.box = box;
    this.now = now;
    this.time = time;
    box.addEventListener("pointermove", (event) => this.point(event));
    box.addEventListener("keydown", (event) => this.press(event));
  }

  /** Reads that data, as that drawing shows it, from now on. */
  use(data, svg) {
    this.data = data;
    this.svg = svg;
    this.shown = data.policies.map((_, index) => this.shown?.[index] ?? true);
    this.box.setAttribute("aria-valuemax", data.axis.end_s);
    if (this.at !== null) this.show(this.at);
  }

  /** What each visible line of a panel is at that moment: one list per policy. */
  readings(panel, at_s) {
    const texts = new Map();
    for (const series of panel.series) {
      if (series.policy >= 0 && !this.shown[series.policy]) continue;
      const value = series.values[last(series.at_s, at_s)];
      const before = texts.get(series.policy) ?? [];
      const text = value == null ? "–" : number(value);
      const isNamed = before.length || series.policy < 0 || !this.data.policies[series.policy];
      if (!before.length || before[0] !== text) before.push(isNamed ? `${series.name} ${text}` : text);
      texts.set(series.policy, before);
    }
    return texts;
  }

  showPanel(panel) {
    const read = this.svg.querySelector(`[data-key="${panel.key}"] .read`);
    read.replaceChildren();
    for (const [policy, texts] of this.readings(panel, this.at)) {
      if (policy >= 0) read.append(element("tspan", `own p${policy % 8}`, "   ■ "), `${this.data.policies[policy]} `);
      read.append(texts.join(", "));
    }
  }

  decisionAt(policy) {
    const decisions = this.data.decisions[policy];
    return decisions[last(decisions.map((each) => each.at_s), this.at)];
  }

  show(at_s) {
    const { end_s, left, right } = this.data.axis;
    this.at = Math.min(Math.max(at_s, 0), end_s);
    const x = left + (right - left) * this.at / end_s;
    this.svg.querySelector(".cursor").setAttribute("d", `M${x} 0V${this.svg.viewBox.baseVal.height}`);
    this.data.panels.forEach((panel) => this.showPanel(panel));
    const lines = [this.time(this.at)];
    this.now.replaceChildren(element("p", "", ""));
    this.now.firstChild.append(element("b", "", `At ${this.time(this.at)}`), ", decided last:");
    this.data.decisions.forEach((_, index) => {
      if (!(this.shown[index] ?? true)) return;
      const decision = this.decisionAt(index);
      const whose = this.data.policies[index] ? `${this.data.policies[index]}, ` : "";
      const text = decision ? `${whose}${this.time(decision.at_s)}: ${decision.text}` : `${whose}nothing yet`;
      const line = element("p", "", "");
      line.append(element("i", `swatch p${index % 8}`, ""), text);
      this.now.append(line);
      lines.push(text);
    });
    this.box.setAttribute("aria-valuenow", this.at.toFixed(1));
    this.box.setAttribute("aria-valuetext", lines.join("; "));
  }

  /** The next decision of a visible policy in that direction. */
  nextDecision(direction) {
    const all = this.data.decisions.flatMap((each, policy) => (this.shown[policy] ?? true) ? each.map((one) => one.at_s) : []);
    const ahead = all.filter((each) => (each - this.at) * direction > 1e-6 && each <= this.data.axis.end_s);
    return ahead.length ? (direction > 0 ? Math.min(...ahead) : Math.max(...ahead)) : this.at;
  }

  point(event) {
    if (!this.data) return;
    const { end_s, left, right, width } = this.data.axis;
    const box = this.svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * width;
    this.show((x - left) / (right - left) * end_s);
  }

  press(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const edge = { Home: 0, End: this.data?.axis.end_s }[event.key];
    if (!this.data || direction === undefined && edge === undefined) return;
    event.preventDefault();
    this.at ??= direction < 0 ? this.data.axis.end_s : 0;
    this.show(edge ?? (event.shiftKey ? this.nextDecision(direction) : this.at + direction * this.data.axis.end_s / 200));
  }
}
