"""Finding the fastest configuration of a kernel, and keeping the record of how it was found.

space       knobs → configurations, one name for equal ones
candidates  the seam: what is tuned, and what runs it
prune       rules and compile results drop candidates before the GPU
worker      processes that may die; ``serve`` is what runs in them
check       right? (``accept`` is the rule, ``eager`` the yardstick)
measure     how fast? in turns with the incumbent
study       the record (``storage``: SQLite under many processes; ``server``: PostgreSQL; ``owner``: who still lives)
tuner       one tuning from start to result (``lane``: its processes; ``progress``: its bar)
schedules   the candidate schedules of a pattern, and the knob that chooses among them
target      the real kernels as candidates
store       ``tuned/``; ``history``: its CSV; ``winners``: from a pattern to a row
job         one tuning as a thing to send; ``cluster``: many of them over Ray
recording   many configurations times many problems in a file; ``recorded_studies``; ``replay``
cover       few configurations that lose little; ``tree`` and ``rule``: the choice among them as code;
            ``features``: what it may ask; ``untuned``: the look-up that asks it
"""
