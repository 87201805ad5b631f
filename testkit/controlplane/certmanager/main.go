// Command certmanager runs cert-manager's own controllers for certificates that a CA in the cluster
// signs, and its cainjector for mutating webhooks. Its release is no module that could be built by itself; what it is made of is.
package main

import (
	"context"
	"flag"
	"log"
	"net/http"
	"os"
	"time"

	certmanager "github.com/cert-manager/cert-manager/pkg/apis/certmanager/v1"
	"github.com/cert-manager/cert-manager/pkg/controller"
	"github.com/cert-manager/cert-manager/pkg/controller/cainjector"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/approver"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/ca"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/selfsigned"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/issuing"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/keymanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/readiness"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/requestmanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/revisionmanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/trigger"
	_ "github.com/cert-manager/cert-manager/pkg/controller/issuers"
	_ "github.com/cert-manager/cert-manager/pkg/issuer/ca"
	_ "github.com/cert-manager/cert-manager/pkg/issuer/selfsigned"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

func main() {
	flags := flag.NewFlagSet(os.Args[0], flag.ExitOnError) // controller-runtime has some in flag's own
	kubeconfig := flags.String("kubeconfig", "", "how the API server is reached")
	listen := flags.String("listen", "127.0.0.1:0", "where /healthz answers once all runs")
	_ = flags.Parse(os.Args[1:]) // else it has exited

	ctx := context.Background()
	factory, err := controller.NewContextFactory(ctx, controller.ContextOptions{
		Kubeconfig:         *kubeconfig,
		KubernetesAPIQPS:   100,
		KubernetesAPIBurst: 200,
		CertificateOptions: controller.CertificateOptions{
			CertificateRequestMinimumBackoffDuration: time.Second,
			CertificateRequestMaximumBackoffDuration: time.Second,
		},
	})
	if err != nil {
		log.Fatalf("reach the API server: %v", err)
	}
	shared, err := factory.Build("controller")
	if err != nil {
		log.Fatalf("build: %v", err)
	}
	running := []controller.Interface{}
	for name, construct := range controller.Known() {
		one, err := construct(factory)
		if err != nil {
			log.Fatalf("build %s: %v", name, err)
		}
		running = append(running, one)
	}
	shared.SharedInformerFactory.Start(ctx.Done())
	shared.KubeSharedInformerFactory.Start(ctx.Done())
	for _, one := range running {
		go func() { log.Fatal(one.Run(2, ctx)) }()
	}
	injector, err := newInjector(ctx, shared.RESTConfig)
	if err != nil {
		log.Fatalf("build the cainjector: %v", err)
	}
	go func() { log.Fatal(injector.Start(ctx)) }()
	http.HandleFunc("/healthz", func(http.ResponseWriter, *http.Request) {})
	log.Fatal(http.ListenAndServe(*listen, nil))
}

func newInjector(ctx context.Context, config *rest.Config) (ctrl.Manager, error) {
	if err := certmanager.AddToScheme(scheme.Scheme); err != nil {
		return nil, err
	}
	manager, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:  scheme.Scheme,
		Metrics: server.Options{BindAddress: "0"}, // none
	})
	if err != nil {
		return nil, err
	}
	return manager, cainjector.RegisterAllInjectors(ctx, manager, cainjector.SetupOptions{
		EnableCertificatesDataSource: true,
		EnabledReconcilersFor:        map[string]bool{cainjector.MutatingWebhookConfigurationName: true},
	})
}
