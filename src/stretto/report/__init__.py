"""`stretto report DIR`: what the traces of a job say, as one HTML page that needs nothing but a browser.

    intervals     sets of moments: union, difference, how much of a window they cover
    steps         a rank's trace -> its steps: how long each computed, communicated and waited
    figures       all ranks' steps -> the job's figures: medians, bytes per link, each transfer's time
    servers       what servers and their workers noted: how busy, how long the queues, how stale; server_tables shows it
    bottleneck    the figures -> one sentence on what holds the job back
    timeline      the spans that the page draws, in rows, at most so many
    page          all of it -> HTML, with its tables; page.css and timeline.js are put into it
    shown         names out of a trace, made harmless to look at
    command       the command line's side: reads the folder, writes the file, prints the sentence

Nothing here imports torch. Whatever comes out of a trace is data of a stranger: names are escaped, and numbers have been checked
when the files were read (`observe/merge.py`).
"""
