// The order of search results: guides before the reference, and records of what was done behind both.
// The numbers are Sphinx's own; see html_search_scorer.
var Scorer = {
  score: ([file, , , , score, , kind]) => {
    if ((file.startsWith("how_to/") && file !== "how_to/README") || file === "something_is_wrong") return score + 4;
    if (file === "index") return score + 2;
    if (file.startsWith("api/") && kind === "text") return score - 1;
    return /^(about|benchmarks|decisions)\/|^(coverage|mutation)$/.test(file) ? score - 10 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
