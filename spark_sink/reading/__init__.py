"""Reading in Spark: tables of one version, and a node's segments as a data source."""
