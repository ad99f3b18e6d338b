const data = JSON.parse(document.getElementById("data").textContent);
const { unit, unit_s } = data.axis;
const time = (at_s) => `${Number((at_s / unit_s).toFixed(unit_s === 1 ? 1 : 2))} ${unit}`;
const box = document.getElementById("charts");
const charts = new Charts(box, document.getElementById("now"), time);
charts.use(data, box.querySelector("svg"));

document.querySelectorAll("[data-switch]").forEach((each) => each.addEventListener("change", () => {
  const policy = Number(each.dataset.switch);
  charts.shown[policy] = each.checked;
  document.querySelectorAll(`svg [data-policy="${policy}"], details[data-policy="${policy}"]`)
    .forEach((shown) => shown.classList.toggle("off", !each.checked));
  if (charts.at !== null) charts.show(charts.at);
}));
