// Polls the status of the run: updates the line on the page and passes the state to `onState`.
const POLL_MS = 2000;

export function live(line, onState, onError = () => {}) {
  async function poll() {
    try {
      const answer = await fetch("api/state");
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const { state, status } = await answer.json();
      if (line.textContent !== status) line.textContent = status;
      onState(state);
    } catch { onError(); }
    setTimeout(poll, POLL_MS);
  }
  poll();
}
