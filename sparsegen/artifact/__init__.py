"""Artifacts: what was compiled, kept in readable folders under the key of what was asked.

key.py       what was asked: the key; two keys say in which fields they differ
manifest.py  what was decided: configuration, variants, versions, digests; a strict reader
folder.py    the disk: atomic publish, retries, one builder a key, removal
store.py     a store: load by key, explain a miss, build once, go on where nothing can be written
rendering.py schedule and kernel text, when built and when opened again
build.py     the whole pipeline, read aloud: ``ensure``
fleet.py     many patterns for many GPU types: ``warm`` and ``check``
archive.py   entries as one file that can be carried elsewhere
signing.py   signatures of entries, keys
remote*.py   stores behind URLs and shared folders: what stores.yaml says, transport, entries, push and pull
cache.py     list and prune
doctor.py    what this machine has and lacks
"""

from __future__ import annotations
