"""The rules that turn a measured signal into findings: growth over depth, outliers, the signal, modules, the loss."""
