"""What a run says about itself: timers, metric reduction, sinks, transcripts, the run's folder and its report."""
