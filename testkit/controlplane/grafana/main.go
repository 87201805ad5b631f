// Command dashboardcheck compares a dashboard with Grafana's schema of dashboards and panels: unknown,
// missing and invalid fields. It reads the JSON from standard input, and ends with status 1 if it finds
// any.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

const version = "0.0.22" // of grafana-foundation-sdk, as go.mod has it

func main() {
	printVersion := flag.Bool("version", false, "print the version of the schema, and end")
	flag.Parse()
	if *printVersion {
		fmt.Println("dashboardcheck of grafana-foundation-sdk", version)
		return
	}
	plugins.RegisterDefaultPlugins()
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	var found dashboard.Dashboard
	// Without a finding the errors may be an empty list that is not nil: the text counts.
	for _, err := range []error{found.UnmarshalJSONStrict(text), found.Validate()} {
		if err != nil && err.Error() != "" {
			fmt.Fprintln(os.Stderr, err)
			defer os.Exit(1)
		}
	}
}
