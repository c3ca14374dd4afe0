"use strict";
// The colours that were chosen in the report, on this page as well, and at once when they are chosen in its frame.
function recolour() {
  let chosen = "";
  try { chosen = localStorage.getItem("stalewise.theme") ?? ""; } catch { /* as the system */ }
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
}
recolour();
addEventListener("storage", recolour);
