// How the run stands, asked again and again: the line on the page is renewed, and `onState` is told the state's word.
const LOOK_MS = 2000;

export function live(line, onState, onSilence = () => {}) {
  async function look() {
    try {
      const answer = await fetch("api/state");
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const { state, standing } = await answer.json();
      if (line.textContent !== standing) line.textContent = standing;
      onState(state);
    } catch { onSilence(); }
    setTimeout(look, LOOK_MS);
  }
  look();
}
