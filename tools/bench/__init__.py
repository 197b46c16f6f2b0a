"""What measures. Each script prints JSON lines, kept in results/; --tiny shows in seconds that it works.

memory.py        bytes of a training step: plan, slopes, devices, recipes; what thrift costs in time
peers.py         speed and memory beside Hugging Face's port
quality.py       quality in time beside a plain GPT; n-grams and xz; losses with and without memory
generation.py    speed of generating and evaluating with the cache, beside the port and doing without
gpu.py, gpu.sh   one accelerator: attentions, steps, generation; what the kernels compile to, without one
recall.py        how far back a trained model answers questions, by memory length
hacks.py         what each diff of tools/hacks does to loss and speed
import_check.py  imported weights beside Hugging Face's port, log-probability by log-probability
faults.py        kills, full disks, damaged files, signals, long runs, random input
"""
