"""Questions and judges for tests of verifiers."""

from stalewise.tasks import Verifier
from stalewise.types import Prompt, Reward

JUDGES = """
import os, signal, sys, time

def judge(prompt, response):
    print("printed by a judge")
    match response:
        case "hang": time.sleep(60)
        case "spin":
            while True: pass
        case "raise": raise ValueError("bad\\nresponse")
        case "exit": sys.exit(3)
        case "die": os._exit(3)
        case "crash": os.kill(os.getpid(), signal.SIGSEGV)
        case "nan": return float("nan")
        case "inf": return {"reward": 1, "bonus": float("inf")}
        case "none": return None
        case "text": return "1.0"
        case "parts": return {"reward": 0.5, "length": 3, "correct": True}
        case "headless": return {"length": 3}
        case "torch": return "torch" in sys.modules
        case "pid": return os.getpid()
        case "interrupt": raise KeyboardInterrupt
        case "children":
            import subprocess
            print(subprocess.Popen(["sleep", "61.25"]).pid, file=open(prompt.answer, "w"), flush=True)
            time.sleep(60)
    return float(response == prompt.answer)

not_callable = 3
"""


def question(answer: str = "8") -> Prompt:
    return Prompt("q", "3+5=", answer)


def score(verifier: Verifier, *responses: str, answer: str = "8") -> list[Reward]:
    return verifier.score([question(answer)] * len(responses), responses)
