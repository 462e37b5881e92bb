// How Sphinx's search orders what it finds: guides first, then other pages, then the reference.
const GUIDES = new Set([
  "start", "choosing", "which_way", "train_step", "policies", "loss_scaling", "autocast", "flags",
  "logging", "casts", "nonfinite", "audit", "choose",
]);

var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, , , , score]) => {
    if (GUIDES.has(page)) return score + 30;
    return /^(reference|project|_modules)\//.test(page) ? score - 10 : score;
  },
};
