"use strict";
// Applies the colours chosen in the report, also when they change in its frame.
function recolour() {
  let chosen = "";
  try { chosen = localStorage.getItem("stalewise.theme") ?? ""; } catch { /* system colours */ }
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
}
recolour();
addEventListener("storage", recolour);
