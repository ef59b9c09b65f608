"""The process that builds kernels for the offline builds: one job for each line of stdin, one reply for each of stdout.

It runs as a script in its own process, because Triton decides when it is imported whether kernels are interpreted.
"""

import contextlib
import importlib.util
import io
import json
import os
import sys
import traceback
from pathlib import Path


def build(job):
    """Build one kernel. What is built is written next to its source; the reply has its shared memory in bytes and ptxas's log."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    spec = importlib.util.spec_from_file_location("kernel", job["path"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pointers = [i for i, kind in enumerate(job["signature"].values()) if kind.startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    kernel = getattr(module, job["name"])
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, job["signature"], {}, aligned)
    options = {"num_warps": job["num_warps"], "num_stages": job["num_stages"]}
    with contextlib.redirect_stdout(io.StringIO()) as log:
        built = triton.compile(source, target=GPUTarget("cuda", job["arch"], 32), options=options)
    for form in ("ttir", "ptx", "cubin"):
        # A kernel in Gluon begins in the next form.
        code = built.asm[form] if form in built.asm else built.asm["ttgir"]
        Path(f"{job['path']}.{form}").write_bytes(code if isinstance(code, bytes) else code.encode())
    return {"shared": built.metadata.shared, "log": log.getvalue()}


def main():
    """Answer jobs until stdin ends. A build that fails is answered with its traceback."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What compilers print does not get between the replies.
    for line in sys.stdin:
        try:
            reply = build(json.loads(line))
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
