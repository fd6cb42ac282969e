// Numbers and reasons as words; no element is touched here.

const STATUSES = ["running", "deferred", "prefill", "queued", "done", "aborted"];

function ms(value) {
  if (value === null || value === undefined) return "\u2013";
  const size = Math.abs(value);
  if (size >= 60000) return `${(value / 60000).toFixed(1)} min`;
  if (size >= 1000) return `${(value / 1000).toFixed(size >= 10000 ? 1 : 2)} s`;
  return `${value.toFixed(size >= 100 ? 0 : 1)} ms`;
}

function count(value) {
  return Math.round(value).toLocaleString("en");
}

function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

const REASONS = {
  budget: (d) => `The step's time budget${d.budget_ms === null ? "" : ` of ${ms(d.budget_ms)}`} was used up.`,
  cap: () => "Its request runs as many branches as the cap allows.",
  baseline: () => "The policy runs one branch of each request; it waits for its turn.",
  triage: () => "Its request is paused, so that others can still be in time.",
  fallback: () => "The latency model is not trusted: one branch of each request runs meanwhile.",
};

// Why a branch is deferred, of a mark as `deferrals` and timelines have it.
function reasonText(mark) {
  const words = REASONS[mark.reason];
  let text = words ? words(mark) : `The policy says: ${mark.reason}.`;
  if (mark.urgent) {
    const slack = mark.urgent_slack_ms;
    const due = slack >= 0 ? `its next token is due in ${ms(slack)}` : `it is ${ms(-slack)} late`;
    text += ` Most urgent was ${shortId(mark.urgent)}: ${due}.`;
  }
  return text;
}

function shortId(id) {
  return id.length > 28 ? `${id.slice(0, 12)}\u2026${id.slice(-12)}` : id;
}

function countsText(counts) {
  return STATUSES.filter((s) => counts[s]).map((s) => `${count(counts[s])} ${s}`).join(", ");
}

// `above` is the branch that it continues, where that is known.
function forkName(fork, above) {
  if (fork.width === 1 && !fork.depth) return "serial";
  if (above && above.width > 1) return `${count(fork.width)} from branch ${above.branch + 1}`;
  return plural(fork.width, "branch").replace(/chs$/, "ches");
}

// Lines of the tooltip of a branch.
function branchLines(branch, now_ms) {
  const lines = [`Branch ${branch.branch + 1} of ${branch.width}: ${branch.status}`];
  if (branch.mark) {
    const since = now_ms - branch.mark.now_ms;
    lines.push(`Deferred since step ${count(branch.mark.step)}, for ${ms(Math.max(0, since))}. ${reasonText(branch.mark)}`);
  }
  lines.push(`${plural(branch.output_tokens, "token")}; ran in ${plural(branch.steps_run, "step")}, left out of ${count(branch.steps_deferred)}`);
  return lines;
}
