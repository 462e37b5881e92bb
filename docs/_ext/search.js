// How the search orders what it finds, guides first, and which excerpts it shows.
const GUIDES = [ // of two that fit as well, the first
  "policies", "loss_scaling", "autocast", "nonfinite", "start", "choosing", "which_way", "train_step",
  "flags", "logging", "audit", "choose", "casts", "production",
];

var Scorer = {
  objNameMatch: 41, // a name that is typed in full: above headings of guides, below their titles
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, title, anchor, , score, , kind]) => {
    if (GUIDES.includes(page)) {
      const query = new URLSearchParams(location.search).get("q").toLowerCase();
      const begins = query.split(/\W+/).map(word => word.slice(0, 4)); // scale, scaling, scaler
      const isTitled = !anchor && begins.every(each => title.toLowerCase().includes(each));
      return score + (isTitled ? 40 : 30) - GUIDES.indexOf(page) / 100;
    }
    if (kind === "object") return page === "reference/mpx" ? score - 1 : score;
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
