"""`ringfort run`, and processes of this machine.

run_options.py          RunOptions, ElasticOptions: what the user asked for
launcher.py             run_job: the loop of a launcher
elastic_launcher.py     run_elastic: the loop with --elastic; restarts.py says when a rank starts again (pure)
agreement.py            Agreement: when ranks start and when the run ends (pure)
agreement_messages.py   what launchers send each other
ticket.py               Ticket: what a launcher was asked to run; differences.py compares tickets
failure_report.py       Failure: why a run failed, and which failure came first (pure)
machine_ranks.py        MachineRanks: the ranks of this machine
drawing.py, printer.py  output of the ranks: progress bars, and lines with their rank
run_watch.py            RunWatch: what a launcher keeps, shows and serves of its ranks while they run
output_files.py         OutputFiles: the output of ranks in files
status_line.py          StatusLine: the line about the run in a terminal
metrics_server.py       MetricsServer: metrics for Prometheus
place.py                where ranks meet
processes.py            Children: start, read, signal and end processes; reaper.py ends them if their parent dies
local_ranks.py          LocalRanks: a group of ranks on this machine that reports to its parent
local_group.py          ringfort.local: ranks behind a notebook; local_group_rank.py is such a rank, and
                        local_group_frames.py is how the two talk
function_source.py      how functions get from a notebook to its ranks without pickle
"""
