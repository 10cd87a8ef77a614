"""From a mask as a formula to loops over key tiles in closed form.  In the order in which the analysis runs:

text, forms, intervals      integer forms of positions: what they are, what they say, between what they lie
formula, normalise          an expression as a union of cubes of ranges
facts, branches             what a cube proves; a cube without others
decompose, choose           which disjoint branches, by cost
digits, tidy, limits        positions in the digits of a tiling; one conjunct solved for one of them
boxes, guards, tiling       a branch as a segment: its box of keys for any query tile, the full part, what is tested where
naming                      names and order of segments
tree, build, canonical      the schedule; the passes that make it; equal masks are equal schedules
tiles, verify, counters,
visible, count              the schedule in numbers: visited tiles, counts, cell-by-cell proof against the mask
shortfalls                  notes of what was given up at a bound
reach, dump, graph          32-bit limits, readable text, networkx graph
chunks                      how a split sweep divides the keys
"""
