// Renders a chart with Helm's own engine: helm-render CHART [VALUES.yaml], the manifests on stdout. The whole
// of Helm takes three times as long to build, and nothing else of it is needed.
package main

import (
	"fmt"
	"os"
	"sort"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
)

func must[T any](value T, err error) T {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return value
}

func main() {
	chart := must(loader.Load(os.Args[1]))
	given := chartutil.Values{}
	if len(os.Args) > 2 {
		given = must(chartutil.ReadValuesFile(os.Args[2]))
	}
	options := chartutil.ReleaseOptions{Name: "picker", Namespace: "inference", Revision: 1, IsInstall: true}
	values := must(chartutil.ToRenderValues(chart, given, options, chartutil.DefaultCapabilities))
	renderer := engine.Engine{Strict: true} // a value that is not there is an error
	files := must(renderer.Render(chart, values))
	names := make([]string, 0, len(files))
	for name := range files {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		if strings.HasSuffix(name, ".yaml") && strings.TrimSpace(files[name]) != "" {
			fmt.Printf("---\n# Source: %s\n%s\n", name, files[name])
		}
	}
}
