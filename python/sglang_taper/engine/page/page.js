// Fetching, figures, the tooltip, keys and the timeline of one branch.

const POLL_MS = 1000;
const KEY = "taper-key";
let lastStep = 0;
let failures = 0;
let paused = false;
let timer = null;
let current = null; // the tree item that the Tab key comes to

async function get(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  return fetch(path, { headers, cache: "no-store" });
}

function connection(state, text) {
  setAttr(byId("connection"), "data-state", state);
  setText(byId("connection"), text);
}

async function poll() {
  clearTimeout(timer);
  if (paused || document.hidden) return;
  try {
    // Again the last few: they were not measured yet.
    const answer = await get(`live?after_step=${Math.max(0, lastStep - 4)}`);
    if (answer.status === 401) return askForKey();
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    const told = await answer.json();
    if (paused) return;
    showAnswer(told);
    failures = 0;
    connection("live", "live");
  } catch (error) {
    failures += 1;
    connection("lost", `no answer, trying again (${error.message})`);
  }
  timer = setTimeout(poll, POLL_MS * Math.min(10, 1 + failures));
}

function askForKey() {
  const wasWrong = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  byId("view").hidden = true;
  byId("key-form").hidden = false;
  setText(byId("key-wrong"), wasWrong ? "The server does not take this key." : "");
  connection("waiting", "waiting for a key");
  byId("key").value = "";
  byId("key").focus();
}

function showAnswer(answer) {
  const ranks = answer.dp_ranks;
  if (!ranks) return render(answer);
  const select = byId("rank");
  byId("rank-box").hidden = false;
  while (select.length < ranks.length) select.add(new Option(select.length));
  return render(ranks[select.selectedIndex]);
}

// The whole page from one answer of `GET /taper/live`.
function render(state) {
  byId("key-form").hidden = true;
  byId("view").hidden = false;
  if (state.step < lastStep) pastSteps.clear();
  lastStep = state.step;
  addSteps(state.steps);
  forgetSteps(state.now_ms);
  showFigures(state);
  drawCharts(state.now_ms);
  showRequests(state);
  if (!byId("tip").hidden) showTip(tipOf);
}

function figure(name, value, note, bad = false) {
  setText(byId(`f-${name}`), value);
  setText(byId(`n-${name}`), note);
  byId(`n-${name}`).title = note;
  byId(`f-${name}`).classList.toggle("bad", bad);
}

function showFigures(state) {
  const steps = [...pastSteps.values()];
  const step = steps.at(-1);
  const measured = steps.findLast((s) => s.measured_ms !== null && s.predicted_ms !== null);
  const service = state.service;
  setText(byId("version"), `sglang_taper ${state.version}`);
  figure("policy", state.params.policy, state.latency_model.trusted ? `TPOT SLO ${ms(state.params.tpot_slo_ms)}, rho ${state.params.rho}` : "latency model not trusted");
  byId("n-policy").classList.toggle("bad", !state.latency_model.trusted);
  figure("width", step ? `${step.num_admitted} of ${step.num_rows}` : "\u2013", step ? `${plural(step.num_requests, "request")}; bound by ${step.reason}; ${count(state.num_waiting)} waiting` : "no step in the last minute");
  figure("step", measured ? ms(measured.measured_ms) : "\u2013", measured ? `predicted ${ms(measured.predicted_ms)}; mean error ${percent(state.latency_model.mape)}` : "");
  figure("slack", ms(step?.min_slack_ms), step && step.min_slack_ms !== null ? `of budget ${ms(step.budget_ms)}, S0 ${ms(step.baseline_ms)}` : "no request is protected");
  figure("attainment", percent(service.slo_attainment), `${count(service.num_requests_in_slo)} of ${plural(service.num_requests_ended, "request")} ended in ${count(service.window_s)} s`, service.slo_attainment !== null && service.slo_attainment < 0.9);
  figure("goodput", `${count(service.token_goodput)} tok/s`, `${service.request_goodput.toFixed(2)} good requests/s`);
  const pool = state.pool;
  figure("kv", `${count(pool.free)} free`, `${count(state.pinned_tokens)} under ${plural(state.num_pins, "pin")}, ${count(pool.evictable)} cached, ${count(pool.total)} tokens in all`);
  drawPool(pool, Math.min(state.pinned_tokens, pool.protected));
}

function percent(share) {
  return share === null || share === undefined ? "\u2013" : `${(100 * share).toFixed(1)} %`;
}

// -- the tooltip

let tipOf = null;

function showTip(cell) {
  const branch = branches.get(cell);
  if (!branch || !cell.isConnected) return hideTip();
  const tip = byId("tip");
  tip.replaceChildren();
  for (const line of branchLines(branch, serverNow)) element("p", "", tip, line);
  element("p", "rid", tip, branch.rid);
  tipOf?.removeAttribute("aria-describedby");
  cell.setAttribute("aria-describedby", "tip");
  tipOf = cell;
  tip.hidden = false;
  const at = cell.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const below = at.bottom + 8 + size.height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - size.height - 8)}px`;
}

function hideTip() {
  byId("tip").hidden = true;
  tipOf?.removeAttribute("aria-describedby");
  tipOf = null;
}

// -- keys: one tab stop, arrows inside

function items() {
  return [...byId("requests").querySelectorAll('[role="treeitem"]')];
}

function keepOneTabStop() {
  if (current?.isConnected) return;
  current = byId("requests").querySelector('[role="treeitem"]');
  if (current) current.tabIndex = 0;
}

function moveTo(item) {
  if (!item) return;
  if (current) current.tabIndex = -1;
  current = item;
  item.tabIndex = 0;
  item.focus();
}

// The item in the line above or below, nearest to where this one is.
function vertical(item, direction) {
  const here = item.getBoundingClientRect();
  const beyond = items().filter((other) => {
    const there = other.getBoundingClientRect();
    return direction > 0 ? there.top >= here.bottom - 2 : there.bottom <= here.top + 2;
  });
  const gap = (other) => Math.abs(other.getBoundingClientRect().top - here.top);
  const near = Math.min(...beyond.map(gap));
  const line = beyond.filter((other) => gap(other) < near + 4);
  const off = (other) => Math.abs(other.getBoundingClientRect().left - here.left);
  return line.sort((a, b) => off(a) - off(b))[0];
}

function onKey(event) {
  const all = items();
  const at = all.indexOf(document.activeElement);
  if (event.key === "Escape") return hideTip();
  if (at < 0 || event.ctrlKey || event.altKey || event.metaKey) return;
  const moves = {
    ArrowRight: () => all[at + 1], ArrowLeft: () => all[at - 1],
    ArrowDown: () => vertical(all[at], 1), ArrowUp: () => vertical(all[at], -1),
    Home: () => all[0], End: () => all.at(-1),
    PageDown: () => all.slice(at + 1).find((i) => i.classList.contains("title")),
    PageUp: () => all.slice(0, at).findLast((i) => i.classList.contains("title")),
  };
  if (event.key === "Enter") openStory(all[at]);
  else if (moves[event.key]) moveTo(moves[event.key]());
  else return;
  event.preventDefault();
}

// -- what happened to one branch

async function openStory(item) {
  const id = branches.get(item)?.rid ?? item.dataset.id;
  if (!id) return;
  const answer = await get(`requests/${id.split("/").map(encodeURIComponent).join("/")}`);
  const told = answer.ok ? await answer.json() : null;
  const dialog = byId("story");
  setText(byId("story-title"), id);
  byId("story-rows").replaceChildren();
  setText(byId("story-note"), told ? "Times since the request arrived." : "The server has forgotten it.");
  for (const branch of (told?.dp_ranks?.[0] ?? told)?.branches ?? []) showStory(branch);
  hideTip();
  dialog.showModal();
}

function showStory(branch) {
  const rows = byId("story-rows");
  const head = element("th", "", element("tr", "", rows), `Branch ${branch.branch + 1} of ${branch.width}: ${branch.status}, ${plural(branch.output_tokens, "token")}`);
  head.colSpan = 5;
  for (const span of branch.spans) {
    const row = element("tr", "", rows);
    const steps = span.from_step === undefined ? "" : `${span.from_step}\u2013${span.to_step ?? ""}`;
    for (const text of [ms(span.from_ms), ms(span.to_ms - span.from_ms), span.status, steps, span.reason ? reasonText(span) : ""]) element("td", "", row, text);
  }
}

function start() {
  makeCharts();
  const forest = byId("requests");
  forest.addEventListener("pointerover", (e) => branches.has(e.target) ? showTip(e.target) : hideTip());
  forest.addEventListener("pointerleave", hideTip);
  forest.addEventListener("focusin", (e) => { if (branches.has(e.target)) showTip(e.target); else hideTip(); });
  forest.addEventListener("focusout", hideTip);
  forest.addEventListener("click", (e) => { const item = e.target.closest('[role="treeitem"]'); if (item) moveTo(item); });
  forest.addEventListener("dblclick", (e) => { const item = e.target.closest('[role="treeitem"]'); if (item) openStory(item); });
  document.addEventListener("keydown", onKey);
  byId("story-close").addEventListener("click", () => byId("story").close());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, byId("key").value);
    poll();
  });
  byId("pause").addEventListener("click", () => {
    paused = !paused;
    setAttr(byId("pause"), "aria-pressed", paused);
    connection(paused ? "paused" : "live", paused ? "paused" : "live");
    poll();
  });
  byId("rank").addEventListener("change", () => { pastSteps.clear(); lastStep = 0; poll(); });
  document.addEventListener("visibilitychange", poll);
  poll();
}

start();
