// How the search orders what it finds, guides first, and which excerpts it shows.
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

// Excerpts are of the article, without the buttons that the theme puts above it.
document.addEventListener("DOMContentLoaded", () => {
  const textOf = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    const article = page.querySelector("article.bd-article");
    return textOf(article ? `<div role="main">${article.innerHTML}</div>` : html, anchor);
  };
});
