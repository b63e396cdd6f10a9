"""python -m pfedbayes"""

from pfedbayes.cli import main

main()
