import sys, time, tempfile, shutil, traceback, warnings, os
warnings.simplefilter("ignore")
sys.path[:0] = ["src", "tests"]
from pathlib import Path
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging; logging.set_verbosity_error()
from stalewise.config import make_config
from stalewise.models.loading import EMBEDDED
from stalewise.orchestrator import model_check as mc
from stalewise.rollout.factory import make_sampler
from stalewise.tasks import make_task
import families
def timed(name, config, path, task):
    try:
        sampler = make_sampler(config)
        t=time.perf_counter(); sampler.load(path); load=time.perf_counter()-t
        t=time.perf_counter(); found = mc.agreements(config, path, task, sampler); s=time.perf_counter()-t
        print(f"{name:34} load {load:5.1f} check {s:5.1f} s", " | ".join(f"{o.what}: max {o.largest:.2e} mean {o.mean:.2e} tol {o.tolerance:.2e} ratio {o.mean/o.tolerance:.2f} {o.error[:150]}" for o in found), "" if all(o.is_right for o in found) else "WRONG", flush=True)
        sampler.close()
    except Exception as e:
        print(f"{name:34} {type(e).__name__}: {str(e)[:250]}", flush=True)
d=Path(tempfile.mkdtemp())
torch.manual_seed(0)
def qwen(path, **k):
    c=Qwen2Config(**dict(vocab_size=151936,hidden_size=896,intermediate_size=4864,num_hidden_layers=24,num_attention_heads=14,num_key_value_heads=2,max_position_embeddings=32768,tie_word_embeddings=True,eos_token_id=1,pad_token_id=0,bos_token_id=1)|k)
    with torch.device("cuda"): m=Qwen2ForCausalLM(c)
    with torch.no_grad(): m.get_input_embeddings().weight.mul_(4)
    m.save_pretrained(path)
    for n in ("tokenizer.json","tokenizer_config.json"): shutil.copy(EMBEDDED/"arithmetic"/n, path/n)
qwen(d/"q")
task=make_task("arithmetic",seed=0)
def conf(**k): return make_config({"model":{"path":str(d/"q"),**k.get("model",{})},"sampler":{"max_new_tokens":k.get("new",1024),**k.get("sampler",{})},"learner":k.get("learner",{})})
timed("qwen 0.5b bf16", conf(), d/"q", task)
timed("qwen 0.5b bf16 again", conf(), d/"q", task)
timed("qwen 0.5b bf16 8k", conf(new=8192), d/"q", task)
timed("qwen 0.5b bf16 checkpointing", conf(learner={"gradient_checkpointing":True}), d/"q", task)
timed("qwen 0.5b float32", conf(model={"precision":"float32"}), d/"q", task)
timed("qwen 0.5b bf16-only", conf(model={"precision":"bfloat16-only"}), d/"q", task)
timed("qwen 0.5b int8", conf(sampler={"weights":"int8"}), d/"q", task)
timed("qwen 0.5b compiled", conf(learner={"compile":"always"}), d/"q", task)
shutil.rmtree(d/"q")
coins=make_task("coins",seed=0)
for f in sorted(families.FAMILIES):
    p=d/f
    try: families.build(f,p)
    except Exception as e: print(f, "not built", type(e).__name__, str(e)[:80]); continue
    for prec in ("bfloat16","float32"):
        r=families.settings(p,d,f); r["model"]|={"device":"cuda","precision":prec}
        timed(f+" "+prec, make_config(r), p, coins)
