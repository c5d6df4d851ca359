"""`python -m tests.simulation SEEDS [--trace] [--shrink]`: plays the stories of seeds, such as 17 or 0..999."""

from __future__ import annotations

import sys
import time
from tests.simulation.running import play
from tests.simulation.story import of_seed

if __name__ == "__main__":
    text = sys.argv[1]
    first, _, last = text.partition("..")
    from collections import Counter
    reached=Counter(); t0=time.process_time(); sim=0; ev=0; bad=0
    for seed in range(int(first), int(last or first)+1):
        t1=time.process_time()
        story=of_seed(seed)
        r=play(story, "--trace" in sys.argv)
        sim+=r.seconds; ev+=r.events; reached+=r.reached
        if "-v" in sys.argv: print(seed, round(time.process_time()-t1,3), round(r.seconds,1), r.events, r.digest)
        if "--trace" in sys.argv: print("\n".join(r.lines))
        if r.violation:
            bad+=1
            print("SEED",seed,r.violation); 
            if "--story" in sys.argv: print("\n".join(story.lines())); print("\n".join(r.lines[-40:]))
    cpu=time.process_time()-t0
    print(f"{cpu:.1f}s cpu, {sim:.0f}s simulated, x{sim/cpu:.0f}, {ev} events, {bad} bad")
    if "-r" in sys.argv: print(reached)
