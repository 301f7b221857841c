"""Reliability"""

SECTIONS = {
    "stress": dict(
        about="What is broken on purpose, at random, and how often it was",
        json=["stress.json"], table="stress_table",
        reads=[
            "None of these ended in a traceback, a hang or a lost file; each had 2 GB of memory "
            "beyond what torch takes. After kills, full disks and starts at once the same command, "
            "or --resume, ended with weights, averages and losses equal to the last bit.",
            "A bad command line is a valid one with one to three of the script's own flags and "
            "odd values; a foreign checkpoint is ours with bits flipped, a part cut off, or a "
            "value gone, strange or of another shape.",
            "Kills come at any moment, or at the n-th operation on files. Disks are full by a "
            "limit on the size of a file. All of it runs in forks of one process, which has "
            "imported torch, on models of a few thousand weights.",
        ]),
}
